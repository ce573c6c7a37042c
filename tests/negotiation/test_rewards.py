"""bupo.negotiation.rewards: parts by hand, the order of endings, the slope along the frontier, and known abuses."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tiny import HAND as SCENARIO

from bupo.config import ConfigError
from bupo.negotiation.dialogue import Dialogue, play
from bupo.negotiation.opponents import EVALUATION_OPPONENTS, TRAINING_OPPONENTS, seat_player
from bupo.negotiation.phrases import TRAINING_PHRASES
from bupo.negotiation.protocol import render_offer
from bupo.negotiation.rewards import (
    PARTS,
    RewardConfig,
    conduct,
    constructive,
    creativity,
    fairness,
    good_faith,
    reward,
    tone,
)
from bupo.negotiation.scenario import Scenario, ScenarioConfig, procurement
from bupo.records import Episode

CONFIG = RewardConfig()
EVERYONE = [*TRAINING_OPPONENTS, *EVALUATION_OPPONENTS]

BUYER, SUPPLIER = SCENARIO.profiles


def say(*outcome, text="Well."):
    return f"{text} {render_offer(SCENARIO.issues, outcome)}"


def talk(*messages, scenario=SCENARIO, retries=1):
    """The episode of these messages, the opener's first."""
    dialogue = Dialogue(scenario, ("a", "b"), retries)
    for message in messages:
        dialogue.take(message)
    return dialogue.episode()


def with_deal(scenario, episode, outcome, rounds=None):
    """The same talk, had it ended with this deal (or none)."""
    if outcome is None:
        utilities, surplus = tuple(p.limit / 100 for p in scenario.profiles), (0.0, 0.0)
    else:
        score = [sum(t[i] for t, i in zip(p.points, outcome, strict=True)) for p in scenario.profiles]
        utilities = tuple(s / 100 for s in score)
        surplus = tuple((s - p.limit) / (100 - p.limit) for s, p in zip(score, scenario.profiles, strict=True))
    return replace(
        episode,
        status="timeout" if outcome is None else "deal",
        deal=outcome,
        blame=None,
        rounds=episode.rounds if rounds is None else rounds,
        utilities=utilities,
        surplus=surplus,
    )


class Chaotic:
    """Offers, accepts, walks and babbles at random, in any tone: behaviour of an untrained policy."""

    def __init__(self, scenario, rng):
        self.scenario, self.rng = scenario, rng

    def speak(self, view):
        words = ["Thank you.", "Take it or leave it.", "Here.", "You are ridiculous, please."][self.rng.integers(4)]
        draw = self.rng.random()
        if draw < 0.1:
            return f"{words} no action"
        if draw < 0.2:
            return f"{words} [Accept]"
        if draw < 0.23:
            return f"{words} [Walk]"
        outcome = tuple(int(self.rng.integers(len(issue.values))) for issue in self.scenario.issues)
        return f"{words} {render_offer(self.scenario.issues, outcome)}"


@pytest.fixture(scope="module")
def simulated() -> list[tuple[Scenario, Episode]]:
    """300 talks: a third between scripted players, a third with one chaotic side, a third with two."""
    found = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        scenario = procurement(ScenarioConfig(), seed, zopa=seed % 10 > 0)
        names = tuple(str(n) for n in rng.choice(EVERYONE, 2))
        talkers = [seat_player(name, scenario, seat, rng) for seat, name in enumerate(names)]
        for seat in range(seed % 3):
            talkers[(seat + seed) % 2] = Chaotic(scenario, rng)
        found.append((scenario, play(scenario, names, tuple(talkers)).episode()))
    statuses = [episode.status for _, episode in found]
    assert {s: statuses.count(s) > 10 for s in ("deal", "walk", "timeout", "invalid")} == dict.fromkeys(
        ("deal", "walk", "timeout", "invalid"), True
    )
    return found


# --- parts by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Here is an offer. [Accept]", 0.5),
        ("", 0.5),
        ("Thank you. [Accept]", 1.0),
        ("We APPRECIATE it.", 1.0),
        ("Take it or leave it.", 0.0),
        ("Thank you, but your offer is a joke.", 0.0),
        ("This is unfair to pleasers.", 0.5),
    ],
)
def test_tone_by_hand(text, expected):
    assert tone(text) == expected


@pytest.mark.parametrize(("name", "expected"), [("warm", 1.0), ("plain", 0.5), ("hard", 0.0)])
def test_training_phrases_are_heard_in_the_tone_that_they_are_filed_under(name, expected):
    for situation, leads in TRAINING_PHRASES.leads.items():
        for lead in leads[name]:
            assert tone(lead) == expected, (situation, lead)
    assert {tone(reason) for reason in TRAINING_PHRASES.reasons} == {0.5}


def test_stuffing_courteous_words_gains_nothing_over_one():
    stuffed = (
        "Thank you, please, happy, glad, we appreciate, understand, respect, hope, together, fair, wonderful. " * 20
    )
    assert tone(stuffed) == tone("Thank you.") == 1.0
    totals = [
        reward(CONFIG, SCENARIO, talk(say(2, 0), say(0, 1, text=words), say(2, 1), f"{words} [Accept]"), 0)
        for words in ("Thank you.", stuffed)
    ]
    assert totals[0] == totals[1]


def test_one_hostile_word_outweighs_any_courtesy():
    assert tone("Thank you, thank you, please, this is ridiculous, thank you.") == 0.0


def test_good_faith_by_hand():
    # The buyer asks for 100, then 70, then 100 again: one of two counter-offers takes back.
    turns = talk(say(2, 0), say(0, 1), say(2, 1), say(1, 1), say(0, 0), say(0, 1), say(0, 0), "[Accept]").turns
    assert good_faith(turns, 0, BUYER) == 0.5
    # The supplier asks for 100, 50, 50, 50: it gives once, then stands.
    assert good_faith(turns, 1, SUPPLIER) == 1.0


def test_standing_firm_is_good_faith_and_a_refused_message_is_no_offer():
    assert good_faith(talk(say(2, 0), say(0, 1), say(0, 0), say(0, 1), "[Walk]").turns, 0, BUYER) == 1.0
    retried = talk(say(2, 0), say(1, 1), say(0, 0), "Well.", say(0, 1), "[Walk]").turns
    assert retried[3].action.kind == "invalid"
    assert good_faith(retried, 0, BUYER) == 0.0  # from 70 up to 100


def test_good_faith_is_full_without_counter_offers():
    assert good_faith(talk(say(2, 0), say(0, 1), say(2, 0), "[Walk]").turns, 0, BUYER) == 1.0
    assert good_faith(talk(say(2, 0), "[Walk]").turns, 0, BUYER) == 1.0


def test_constructive_by_hand():
    turns = talk(say(2, 0), say(0, 1), say(2, 0), say(0, 1), say(2, 0), say(1, 1), "[Accept]").turns
    assert constructive(turns, 0) == 0.5  # one repetition in two counter-offers
    assert constructive(turns, 1) == 0.0  # nothing but repetitions
    assert constructive(talk(say(2, 0), "[Accept]").turns, 0) == 1.0


def test_fairness_by_hand():
    assert [fairness(u, 0.4) for u in (1.0, 0.4, 0.15, 0.0)] == [1.0, 1.0, 0.75, 0.6]


def test_creativity_by_hand():
    # From (0,0) to (1,1) the buyer gives 30 on price and takes 40 on days: a trade, new to the table. Then back: known.
    episode = talk(say(2, 0), say(0, 0), say(2, 0), say(1, 1), say(2, 0), say(0, 0), "[Accept]")
    assert creativity(SCENARIO, episode, 0) == 0.5
    assert creativity(SCENARIO, episode, 1) == 0.0  # the supplier only repeated itself
    # Taking up the other side's package is no invention.
    assert creativity(SCENARIO, talk(say(1, 1), say(0, 0), say(2, 0), say(1, 1), "[Accept]"), 0) == 0.0
    # A plain concession on one issue is none either.
    assert creativity(SCENARIO, talk(say(2, 0), say(0, 1), say(2, 0), say(1, 1), "[Accept]"), 0) == 0.0


def test_creativity_without_counter_offers_or_without_a_deal_is_none():
    assert creativity(SCENARIO, talk(say(0, 0), "[Accept]"), 0) == 0.0
    assert creativity(SCENARIO, talk(say(2, 0), say(0, 0), say(2, 0), say(1, 1), "[Walk]"), 0) == 0.0


def test_a_whole_reward_by_hand():
    episode = talk(
        say(2, 0),
        say(0, 1, text="Thank you for meeting us."),
        say(2, 1),
        say(1, 1, text="Happy to move."),
        say(0, 0),
        say(1, 1),
        say(0, 0),
        "Done. [Accept]",
    )
    seen = reward(CONFIG, SCENARIO, episode, 0)
    # Surplus (60 - 40) / 60; tone (1 + 1 + .5 + .5) / 4, nothing taken back, stalling 1 of 2, fairness 1; 4 of 8
    # rounds; no trade in two counter-offers.
    expected_conduct = 0.45 * 0.75 + 0.4 + 0.1 * 0.5 + 0.05
    assert conduct(SCENARIO, episode, 0) == pytest.approx(expected_conduct)
    assert (seen.economic, seen.relationship) == pytest.approx((1 / 3, expected_conduct))
    assert (seen.efficiency, seen.creativity) == (0.5, 0.0)
    assert seen.total == pytest.approx(0.5 / 3 + 0.3 * 0.8375 + 0.1 * 0.5)
    assert seen.as_dict().keys() == {*PARTS, "total"}


def test_endings_by_hand():
    walked = talk(say(2, 0), say(0, 1), say(2, 0), "Thank you. [Walk]")
    for seat in (0, 1):
        seen = reward(CONFIG, SCENARIO, walked, seat)
        assert seen.total == -0.4
        assert {getattr(seen, part) for part in PARTS} == {0.0}
    caved = talk(say(2, 0), "Thank you. [Accept]")  # 0 points: 40 of 60 below the limit
    assert reward(CONFIG, SCENARIO, caved, 0).total == pytest.approx(-0.5 - 0.2 * 40 / 60)
    assert reward(CONFIG, SCENARIO, caved, 0).relationship == pytest.approx(0.45 + 0.4 + 0.1 + 0.05 * 1.0)
    broken = talk(say(2, 0), "hm", "hm")
    assert reward(CONFIG, SCENARIO, broken, 0).total == pytest.approx(-0.8 - 2 * 0.05)
    # The other side is not to blame, but has no deal either.
    assert reward(CONFIG, SCENARIO, broken, 1).total == -0.4


def test_each_refused_message_costs_the_seat_that_wrote_it():
    clean = talk(say(2, 0), say(0, 1), say(0, 0), "[Accept]")
    stumbled = talk(say(2, 0), "Well.", say(0, 1), say(0, 0), "Well.", "[Accept]")
    # Tone stays .5 and nothing else differs.
    assert reward(CONFIG, SCENARIO, stumbled, 0).total == pytest.approx(
        reward(CONFIG, SCENARIO, clean, 0).total - 2 * 0.05
    )
    assert reward(CONFIG, SCENARIO, stumbled, 1) == reward(CONFIG, SCENARIO, clean, 1)


# --- properties over simulated talks --------------------------------------------------------------------------------


def test_every_part_lies_between_0_and_1(simulated):
    for scenario, episode in simulated:
        for seat in (0, 1):
            seen = reward(CONFIG, scenario, episode, seat)
            assert all(0 <= getattr(seen, part) <= 1 for part in PARTS)
            assert 0 <= conduct(scenario, episode, seat) <= 1


def test_invalid_is_worse_than_an_irrational_deal_worse_than_no_deal_worse_than_any_rational_deal(simulated):
    """The same talk with four endings; rational deals leave the other side at its limit or above."""
    for scenario, episode in simulated:
        for seat in (0, 1):
            low = [p.limit for p in scenario.profiles]
            own = [scenario.profiles[seat].score(tuple(o)) for o in scenario.outcomes]
            other = [scenario.profiles[1 - seat].score(tuple(o)) for o in scenario.outcomes]
            irrational = sorted((s, i) for i, s in enumerate(own) if s < low[seat])
            rational = sorted((s, i) for i, s in enumerate(own) if s >= low[seat] and other[i] >= low[1 - seat])

            def total(index, *, at, scenario=scenario, episode=episode, seat=seat):
                outcome = None if index is None else tuple(int(v) for v in scenario.outcomes[index])
                return reward(CONFIG, scenario, with_deal(scenario, episode, outcome, rounds=at), seat).total

            # Every rational deal at its least favourable, in the last round; irrational ones at their best, at once.
            late, early = scenario.rounds, 1
            invalid = replace(with_deal(scenario, episode, None), status="invalid", blame=seat)
            worst_deal = total(irrational[0][1], at=late)
            best_bad_deal = total(irrational[-1][1], at=early)
            no_deal = total(None, at=late)
            assert reward(CONFIG, scenario, invalid, seat).total < worst_deal <= best_bad_deal < no_deal
            for _, index in rational[:1] + rational[-1:]:
                assert no_deal < total(index, at=late)


def test_irrational_deals_get_worse_with_the_loss():
    episode = talk(say(2, 0), "[Accept]")
    totals = [reward(CONFIG, SCENARIO, with_deal(SCENARIO, episode, o), 0).total for o in ((2, 0), (1, 0))]
    assert totals[1] - totals[0] == pytest.approx(0.2 * 30 / 60)
    assert totals[1] == pytest.approx(-0.5 - 0.2 * 10 / 60)


def frontier_steps(scenario, seat):
    """Neighbours on the Pareto frontier that are rational for the seat: (worse, better) outcomes with their points."""
    pairs = {}
    for outcome in itertools.product(*(range(len(issue.values)) for issue in scenario.issues)):
        own, other = (scenario.profiles[s].score(outcome) for s in (seat, 1 - seat))
        if own not in pairs or other > pairs[own][0]:
            pairs[own] = (other, outcome)
    best_other, frontier = -1, []
    for own in sorted(pairs, reverse=True):  # from the seat's ideal down, the other side must gain
        other, outcome = pairs[own]
        if other > best_other:
            best_other = other
            frontier.append((own, other, outcome))
    frontier = [point for point in reversed(frontier) if point[0] >= scenario.profiles[seat].limit]
    return list(itertools.pairwise(frontier))


@pytest.fixture(scope="module")
def steps():
    """(seat, worse, better) for all neighbours on the frontiers of 200 scenarios.

    Each end is the same polite talk of three messages, had it ended with that deal: (scenario, own points, other
    side's points, episode).
    """
    found = []
    for seed in range(200):
        scenario = procurement(ScenarioConfig(), seed)
        opening, counter = (render_offer(scenario.issues, o) for o in ((4, 2, 2), (3, 3, 1)))
        base = talk(f"Thank you. {opening}", counter, "[Walk]", scenario=scenario)
        for seat in (0, 1):
            for pair in frontier_steps(scenario, seat):
                ends = [(scenario, own, other, with_deal(scenario, base, outcome)) for own, other, outcome in pair]
                found.append((seat, *ends))
    assert len(found) > 4000
    return found


def rise(seat, worse, better):
    """Difference of the totals of two ends."""
    before, after = (reward(CONFIG, scenario, episode, seat).total for scenario, _, _, episode in (worse, better))
    return after - before


def test_along_the_frontier_the_total_rises_by_at_least_04_per_unit_of_own_utility_at_equal_conduct(steps):
    slopes = []
    for seat, worse, better in steps:
        totals = []
        for scenario, _, _, episode in (worse, better):
            # Conduct includes fairness, which reads the other side's surplus: hold it.
            held = (episode.utilities[0], 1.0) if seat == 0 else (1.0, episode.utilities[1])
            totals.append(reward(CONFIG, scenario, replace(episode, utilities=held), seat).total)
        slopes.append((totals[1] - totals[0]) / ((better[1] - worse[1]) / 100))
        limit = worse[0].profiles[seat].limit
        assert slopes[-1] == pytest.approx(0.5 / (1 - limit / 100))
    assert min(slopes) >= 0.4


def test_the_slope_holds_with_fairness_free_on_every_step(steps):
    assert any(better[2] < better[0].profiles[1 - seat].limit for seat, _, better in steps)
    for seat, worse, better in steps:
        assert rise(seat, worse, better) >= 0.4 * (better[1] - worse[1]) / 100


def test_the_other_sides_surplus_above_its_reservation_changes_nothing(simulated):
    for scenario, episode in simulated[:60]:
        for seat in (0, 1):
            deal = with_deal(scenario, episode, (4, 2, 2))
            seen = {
                reward(CONFIG, scenario, replace(deal, surplus=(0.4, s) if seat == 0 else (s, 0.4)), seat)
                for s in (0.0, 0.01, 0.5, 1.0)
            }
            assert len(seen) == 1


def test_a_deal_in_fewer_rounds_is_worth_more_and_no_deal_saves_nothing():
    episode = with_deal(SCENARIO, talk(say(0, 0), "[Accept]"), (0, 0))
    seen = [reward(CONFIG, SCENARIO, replace(episode, rounds=rounds), 0) for rounds in (1, 4, 8)]
    assert [r.efficiency for r in seen] == pytest.approx([7 / 8, 1 / 2, 0])
    assert seen[0].total - seen[2].total == pytest.approx(0.1 * 7 / 8)
    walked = talk(say(2, 0), "[Walk]")
    assert reward(CONFIG, SCENARIO, walked, 0).efficiency == 0


def test_haste_never_pays_for_a_bad_deal():
    """All that efficiency can give for a deal at once is less than a sixth of the surplus range."""
    episode = talk(say(0, 0), "[Accept]")
    hasty = reward(CONFIG, SCENARIO, with_deal(SCENARIO, episode, (2, 1), rounds=1), 0)  # surplus 0
    patient = reward(CONFIG, SCENARIO, with_deal(SCENARIO, episode, (0, 0), rounds=8), 0)  # surplus 1/3
    assert patient.total - hasty.total == pytest.approx(0.5 / 3 - 0.1 * 7 / 8)


def test_rewards_of_a_seat_do_not_read_the_other_sides_words():
    plain = talk(say(2, 0), say(0, 1), say(0, 0), "[Accept]")
    flattering = talk(say(2, 0, text="Thank you!"), say(0, 1), say(0, 0, text="You are wonderful, please."), "[Accept]")
    assert reward(CONFIG, SCENARIO, plain, 0) == reward(CONFIG, SCENARIO, flattering, 0)


def test_weights_scale_their_parts_only():
    episode = talk(say(2, 0), say(0, 0), say(2, 0), say(1, 1), "[Accept]")
    seen = reward(CONFIG, SCENARIO, episode, 0)
    for part in PARTS:
        config = replace(RewardConfig(economic=0, relationship=0, efficiency=0, creativity=0), **{part: 2.0})
        alone = reward(config, SCENARIO, episode, 0)
        assert alone.total == pytest.approx(2 * getattr(seen, part))
        assert getattr(seen, part) > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"economic": -0.1}, "economic"),
        ({"no_deal": 0.5}, "no_deal"),
        ({"irrational": -0.4}, "irrational"),
        ({"invalid": -0.6}, "invalid"),
        ({"refused": -1}, "refused"),
    ],
)
def test_weights_that_break_the_order_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        RewardConfig(**wrong)
