"""bupo.negotiation.states by hand."""

import numpy as np
import pytest

from bupo.negotiation.dialogue import Dialogue
from bupo.negotiation.protocol import render_offer
from bupo.negotiation.scenario import ScenarioConfig, procurement
from bupo.negotiation.states import FEATURES, turn_states

SCENARIO = procurement(ScenarioConfig(), 3)


def offer(*outcome):
    return render_offer(SCENARIO.issues, outcome)


def test_states_tell_what_the_seat_saw_before_each_of_its_turns():
    dialogue = Dialogue(SCENARIO, ("a", "b"))
    first, second = SCENARIO.opener, 1 - SCENARIO.opener
    for text in (offer(0, 0, 0), "hm", offer(8, 4, 4), "[Accept]"):
        dialogue.take(text)
    episode = dialogue.episode()
    profile = SCENARIO.profiles[second]
    states = turn_states(SCENARIO, episode, second)
    assert states.shape == (2, len(FEATURES))
    row = dict(zip(FEATURES, states[0], strict=True))
    share = float(np.clip(profile.surplus((0, 0, 0)), -1, 1))
    assert (row["time"], row["has_own"], row["refused"]) == (0.0, 0.0, 0.0)
    assert row["has_standing"] == 1 and row["standing"] == pytest.approx(share)
    assert dict(zip(FEATURES, states[1], strict=True))["refused"] == 1
    opener = turn_states(SCENARIO, episode, first)
    assert dict(zip(FEATURES, opener[0], strict=True))["has_standing"] == 0
    later = dict(zip(FEATURES, opener[1], strict=True))
    own = float(np.clip(SCENARIO.profiles[first].surplus((0, 0, 0)), -1, 1))
    assert later["own"] == pytest.approx(own) and later["time"] == pytest.approx(1 / (SCENARIO.rounds - 1))


def test_states_read_nothing_of_the_other_sides_profile():
    from dataclasses import replace

    dialogue = Dialogue(SCENARIO, ("a", "b"))
    for text in (offer(0, 0, 0), offer(8, 4, 4), "[Accept]"):
        dialogue.take(text)
    episode = dialogue.episode()
    other = replace(SCENARIO.profiles[1], limit=0, points=((1,) * 9, (1,) * 5, (1,) * 5))
    changed = replace(SCENARIO, profiles=(SCENARIO.profiles[0], other))
    np.testing.assert_array_equal(turn_states(SCENARIO, episode, 0), turn_states(changed, episode, 0))


def test_a_seat_that_never_spoke_has_no_states():
    dialogue = Dialogue(SCENARIO, ("a", "b"), retries=0)
    dialogue.take("hm")
    assert turn_states(SCENARIO, dialogue.episode(), 1 - SCENARIO.opener).shape == (0, len(FEATURES))
