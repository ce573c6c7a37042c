"""bupo.negotiation.states by hand, on the scenario of tests/tiny.py (utilities in points: see there)."""

from dataclasses import replace

import numpy as np
import pytest
import tiny

from bupo.negotiation.dialogue import Dialogue
from bupo.negotiation.protocol import render_offer
from bupo.negotiation.states import FEATURES, KNOTS, SURPLUSES, design, situation, turn_states

SCENARIO = replace(tiny.HAND, rounds=3)
"""The supplier (limit 30) opens, so the buyer (limit 40) has the last word."""


def offer(*outcome):
    return render_offer(SCENARIO.issues, outcome)


def play(*texts):
    dialogue = Dialogue(SCENARIO, ("a", "b"))
    for text in texts:
        dialogue.take(text)
    return dialogue.episode()


def rows(states):
    return [dict(zip(FEATURES, row, strict=True)) for row in states]


def test_before_and_after_each_message_of_the_buyer():
    # The supplier asks 100 and then 75 points (buyer: 0, 30); the buyer asks 100, repeats it, then takes 40 points.
    episode = play(
        offer(2, 0), "Thanks. " + offer(0, 1), offer(1, 0), "Enough! " + offer(0, 1), offer(2, 1), "[Accept]"
    )
    before, after = (rows(states) for states in turn_states(SCENARIO, episode, 0))
    assert [row["time"] for row in before] == [0, 1, 1]  # two offers that the supplier can answer, then none
    assert [row["last_offer"] for row in before] == [0, 1, 0] and [row["no_offer"] for row in before] == [0, 0, 1]
    assert {row["last_word"] for row in before} == {1.0}
    # Surplus shares of the buyer: (points - 40) / 60.
    assert [row["standing"] for row in before] == pytest.approx([-40 / 60, -10 / 60, 0])
    assert [row["standing_gain"] for row in before] == [0, 0, 0]
    assert [row["given"] for row in before] == pytest.approx([0, 30 / 60, 10 / 60])
    assert [row["has_own"] for row in before] == [0, 1, 1] and [row["has_own"] for row in after] == [1, 1, 1]
    assert [row["own"] for row in after] == pytest.approx([1, 1, 1])
    assert [row["tone"] for row in before] == pytest.approx([0.5, 1, 0.5])
    assert [row["repeats"] for row in after] == [0, 1, 1]
    # What the buyer asks leaves the supplier 0 points of its 30; at best it could have 60 and leave it 50.
    assert [row["theirs"] for row in before] == pytest.approx([0, -30 / 70, -30 / 70])
    assert {row["acceptable"] for row in after} == {0.0}
    assert [row["room"] for row in before + after] == pytest.approx([20 / 60] * 6)
    assert [row["accepted"] for row in before] == [0, 0, 0] and [row["accepted"] for row in after] == [0, 0, 1]
    assert after[2]["deal"] == pytest.approx(0)


def test_concessions_and_steps_back_of_the_supplier():
    # Points of the supplier: 100, 75, 100; limit 30.
    episode = play(offer(2, 0), offer(0, 1), offer(1, 0), offer(0, 1), offer(2, 0), "[Walk]")
    before, after = (rows(states) for states in turn_states(SCENARIO, episode, 1))
    assert {row["last_word"] for row in before} == {0.0}
    assert [row["time"] for row in before] == [0, 0.5, 1] and [row["last_offer"] for row in before] == [0, 0, 1]
    assert before[0]["has_standing"] == 0 and before[1]["standing"] == pytest.approx(-30 / 70)
    assert [row["conceded"] for row in after] == pytest.approx([0, 25 / 70, -25 / 70])
    assert [row["takes_back"] for row in after] == pytest.approx([0, 0, 0.5])
    assert [row["theirs"] for row in after] == pytest.approx([-40 / 60, -10 / 60, -40 / 60])
    assert [row["room"] for row in after] == pytest.approx([20 / 70] * 3)
    buyer = rows(turn_states(SCENARIO, episode, 0)[1])
    assert [row["walked"] for row in buyer] == [0, 0, 1]


def test_a_refused_message_is_seen_and_takes_no_time():
    episode = play(offer(2, 0), "hm", offer(0, 1), "[Accept]")
    before, after = (rows(states) for states in turn_states(SCENARIO, episode, 0))
    assert [row["refused"] for row in before] == [0, 1] and [row["refused"] for row in after] == [1, 0]
    assert [row["time"] for row in before] == [0, 0]


def test_an_offer_at_the_other_sides_limit_is_acceptable():
    episode = play(offer(2, 0), offer(0, 1), offer(2, 1), offer(2, 0), "[Walk]")
    supplier, buyer = (rows(turn_states(SCENARIO, episode, seat)[1]) for seat in (1, 0))
    assert [row["acceptable"] for row in supplier][:2] == [0, 1] and supplier[1]["theirs"] == 0
    assert [row["acceptable"] for row in buyer] == [0, 1]


def test_only_what_offers_are_worth_to_it_and_the_room_depend_on_the_other_sides_profile():
    episode = play(offer(2, 0), offer(0, 1), "[Accept]")
    other = replace(SCENARIO.profiles[1], limit=0, points=((1, 1, 1), (1, 1)))
    changed = replace(SCENARIO, profiles=(SCENARIO.profiles[0], other))
    private = [FEATURES.index(name) for name in ("theirs", "acceptable", "room")]
    for ours, theirs in zip(turn_states(SCENARIO, episode, 0), turn_states(changed, episode, 0), strict=True):
        np.testing.assert_array_equal(np.delete(ours, private, 1), np.delete(theirs, private, 1))
        assert not np.array_equal(ours[:, private], theirs[:, private])


def test_a_seat_that_never_spoke_has_no_states():
    dialogue = Dialogue(SCENARIO, ("a", "b"), retries=0)
    dialogue.take("hm")
    for states in turn_states(SCENARIO, dialogue.episode(), 0):
        assert states.shape == (0, len(FEATURES))


def test_design_holds_features_products_and_hinges():
    episode = play(offer(2, 0), offer(0, 1), offer(1, 0), offer(0, 1), offer(2, 1), "[Accept]")
    _, after = turn_states(SCENARIO, episode, 0)
    wide = design(after)
    count = len(FEATURES)
    assert wide.shape == (3, count + count * (count + 1) // 2 + len(SURPLUSES) * len(KNOTS))
    np.testing.assert_array_equal(wide[:, :count], after)
    pairs = sorted(a * b for i, a in enumerate(after[0]) for b in after[0][i:])
    np.testing.assert_allclose(sorted(wide[0, count : count + len(pairs)]), pairs)
    # The buyer's own offer is worth the whole surplus, the supplier's standing one -10 / 60 of it.
    row = dict(zip(SURPLUSES, wide[1, -len(SURPLUSES) * len(KNOTS) :].reshape(len(SURPLUSES), -1), strict=True))
    np.testing.assert_allclose(row["own"], [1 - knot for knot in KNOTS])
    np.testing.assert_allclose(row["standing"], 0, atol=1e-12)


def test_situations_tell_final_offers_and_accepted_deals_apart():
    episode = play(offer(2, 0), offer(0, 1), offer(1, 0), offer(0, 1), offer(2, 1), "[Accept]")
    buyer, supplier = (turn_states(SCENARIO, episode, seat)[1] for seat in (0, 1))
    assert situation(buyer).tolist() == [0, 2, 7]
    assert situation(supplier).tolist() == [0, 0, 1]
