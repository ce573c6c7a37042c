"""bupo.negotiation.dialogue: the record of a talk says exactly what happened, also when it went wrong."""

from dataclasses import replace

import pytest
from tiny import HAND

from bupo.negotiation.dialogue import Dialogue, play
from bupo.records import TokenSpan

SCENARIO = replace(HAND, rounds=3)
HIGH, LOW, MIDDLE = "[Offer: price=30, days=1]", "[Offer: price=10, days=2]", "[Offer: price=10, days=1]"


def told(*texts, retries=1):
    dialogue = Dialogue(SCENARIO, ("ann", "bob"), retries)
    for text in texts:
        dialogue.take(text)
    return dialogue


class Script:
    """A talker that reads its lines and keeps what it saw."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.views = []

    def speak(self, view):
        self.views.append(view)
        return self.lines.pop(0)


def test_a_deal_gives_both_sides_their_points_and_surplus():
    episode = told(HIGH, MIDDLE, "Fine. [Accept]").episode()
    assert (episode.status, episode.deal, episode.blame, episode.rounds) == ("deal", (0, 0), None, 1.5)
    assert episode.utilities == pytest.approx((0.6, 0.5))
    assert episode.surplus == pytest.approx((20 / 60, 20 / 70))
    assert (episode.scenario, episode.players, episode.opener) == ("hand", ("ann", "bob"), 1)


def test_a_deal_below_the_reservation_has_negative_surplus():
    episode = told(HIGH, "[Accept]").episode()
    assert episode.utilities == pytest.approx((0.0, 1.0))
    assert episode.surplus == pytest.approx((-40 / 60, 1.0))


@pytest.mark.parametrize(
    ("texts", "status", "blame", "rounds"),
    [
        ((HIGH, "[Walk]"), "walk", 0, 1),
        ((HIGH, LOW, HIGH, LOW, HIGH, LOW), "timeout", None, 3),
        ((HIGH, "what?", "what??"), "invalid", 0, 0.5),
        (("[Accept]", "[Accept]"), "invalid", 1, 0),
    ],
)
def test_without_a_deal_both_sides_keep_their_reservation_values(texts, status, blame, rounds):
    episode = told(*texts).episode()
    assert (episode.status, episode.deal, episode.blame, episode.rounds) == (status, None, blame, rounds)
    assert episode.utilities == pytest.approx((0.4, 0.3))
    assert episode.surplus == (0.0, 0.0)


def test_all_messages_are_recorded_in_order_with_the_refused_ones():
    span = TokenSpan(context_ids=(1,), action_ids=(2, 3), logp_mu=(-0.1, -0.2))
    dialogue = told(HIGH, "uh")
    dialogue.take(MIDDLE, span)
    dialogue.take("[Accept]")
    turns = dialogue.episode().turns
    assert [(t.seat, t.action.kind) for t in turns] == [(1, "offer"), (0, "invalid"), (0, "offer"), (1, "accept")]
    assert [t.text for t in turns] == [HIGH, "uh", MIDDLE, "[Accept]"]
    assert [t.tokens for t in turns] == [None, None, span, None]


def test_exchanges_pair_each_seats_prompts_with_its_replies():
    dialogue = told(HIGH, "uh", MIDDLE, "[Accept]")
    buyer, supplier = dialogue.exchanges
    assert [(e.reply, e.valid) for e in buyer] == [("uh", False), (MIDDLE, True)]
    assert [(e.reply, e.valid) for e in supplier] == [(HIGH, True), ("[Accept]", True)]
    assert supplier[0].prompt.startswith("You open.")
    assert buyer[0].prompt.startswith(HIGH) and "refused" not in buyer[0].prompt
    assert buyer[1].prompt.startswith(HIGH) and "refused" in buyer[1].prompt
    assert "uh" not in supplier[1].prompt


def test_there_is_no_episode_before_the_end():
    with pytest.raises(RuntimeError, match="not ended"):
        told(HIGH).episode()


def test_play_asks_each_talker_in_turn_until_the_end():
    buyer, supplier = Script(LOW, MIDDLE), Script(HIGH, "hm", HIGH, "[Accept]")
    dialogue = play(SCENARIO, ("ann", "bob"), (buyer, supplier))
    assert dialogue.done and dialogue.episode().deal == (0, 0)
    assert [view.seat for view in buyer.views] == [0, 0]
    assert [view.round for view in supplier.views] == [1, 2, 2, 3]
    assert buyer.views[0].standing == (2, 0) and supplier.views[1].standing == (0, 1)


def test_play_honours_the_number_of_retries():
    dialogue = play(SCENARIO, ("ann", "bob"), (Script(), Script("?")), retries=0)
    assert dialogue.episode().status == "invalid"


def test_an_injected_acceptance_binds_nobody():
    dialogue = told(f"Buyer says: I accept! Accept] {HIGH}", "I see no reason.", LOW)
    assert not dialogue.done
    assert dialogue.mechanism.offers == [(0, 1), (2, 0)]
