"""bupo.selfplay.matchmaking: shares, groups and seeds of an iteration's dialogues."""

from collections import Counter

import numpy as np
import pytest

from bupo.config import ConfigError
from bupo.learn.demonstrations import SFT_SEEDS
from bupo.negotiation.opponents import EVALUATION_OPPONENTS, TRAINING_OPPONENTS
from bupo.negotiation.scenario import ScenarioConfig
from bupo.selfplay.matchmaking import LEARNER, SCRIPTED_SHARES, TRAINING_SEEDS, InteractConfig, draw_seatings

SCENARIOS = ScenarioConfig()


def draw(config=None, league=(), seed=0):
    return draw_seatings(config or InteractConfig(dialogues=96), SCENARIOS, league, np.random.default_rng(seed))


def test_less_than_one_group_is_refused():
    with pytest.raises(ValueError, match="0 dialogues are less than one group of 8"):
        draw(InteractConfig())


def groups(seatings, size):
    return [seatings[start : start + size] for start in range(0, len(seatings), size)]


def opponent(seating):
    """The player that is not the learner, the learner in self-play."""
    others = [name for name in seating.players if name != LEARNER]
    return others[0] if others else LEARNER


@pytest.mark.parametrize(
    ("dialogues", "size", "expected"), [(96, 8, 96), (100, 8, 96), (8, 8, 8), (15, 8, 8), (5, 1, 5)]
)
def test_the_draw_is_a_whole_number_of_groups(dialogues, size, expected):
    assert len(draw(InteractConfig(dialogues=dialogues, group_size=size))) == expected


def test_a_group_shares_scenario_role_opponent_and_the_scripted_players_luck():
    for group in groups(draw(league=["past0005"]), 8):
        assert len({s.scenario.name for s in group}) == 1
        assert len({s.players for s in group}) == 1
        assert len({s.learner for s in group}) == 1
        assert len({s.seed for s in group}) == 1


def test_groups_have_scenarios_of_their_own():
    assert len({s.scenario.name for s in draw()}) == 12


def test_the_learner_flag_marks_the_learners_seats():
    for seating in draw(league=["past0005"]):
        assert seating.learner == tuple(name == LEARNER for name in seating.players)
        assert any(seating.learner)


def test_shares_by_hand():
    # 20 groups of 5: 8 in self-play, 4 against past selves, 8 against scripted players.
    config = InteractConfig(dialogues=100, group_size=5, self_play=0.4, past=0.2, scripted={"firm": 1.0})
    seatings = draw(config, ["past0005", "past0010"])
    count = Counter(opponent(s) for s in seatings)
    assert count[LEARNER] == 40
    assert count["past0005"] + count["past0010"] == 20
    assert count["firm"] == 40


def test_without_past_selves_their_share_goes_to_scripted_players():
    config = InteractConfig(dialogues=100, group_size=5, self_play=0.4, past=0.2, scripted={"firm": 1.0})
    count = Counter(opponent(s) for s in draw(config))
    assert count == {LEARNER: 40, "firm": 60}


@pytest.mark.parametrize(("self_play", "past"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_extreme_shares(self_play, past):
    config = InteractConfig(dialogues=64, group_size=1, self_play=self_play, past=past)
    found = {opponent(s) for s in draw(config, ["past0001"])}
    if self_play:
        assert found == {LEARNER}
    elif past:
        assert found == {"past0001"}
    else:
        assert LEARNER not in found and found <= set(TRAINING_OPPONENTS)


def test_scripted_opponents_and_roles_follow_their_frequencies():
    config = InteractConfig(dialogues=1000, group_size=1, self_play=0, past=0, scripted={"firm": 3, "eager": 1})
    seatings = draw(config)
    count = Counter(opponent(s) for s in seatings)
    # Binomial with n = 1000: standard deviation 13.7 at p = 3/4 and 15.8 at 1/2; five of them allowed.
    assert set(count) == {"firm", "eager"}
    assert abs(count["firm"] - 750) < 69
    assert abs(sum(s.learner[0] for s in seatings) - 500) < 79


def test_only_training_opponents_are_met():
    assert set(SCRIPTED_SHARES) <= set(TRAINING_OPPONENTS)
    assert sum(SCRIPTED_SHARES.values()) == pytest.approx(1)
    config = InteractConfig(dialogues=400, group_size=1, self_play=0, past=0)
    met = {opponent(s) for s in draw(config)}
    assert met == set(SCRIPTED_SHARES)
    assert not met & set(EVALUATION_OPPONENTS)


def test_training_scenarios_come_from_seeds_above_held_out_and_sft_seeds():
    assert TRAINING_SEEDS > SFT_SEEDS
    seeds = [int(s.scenario.name.removeprefix("procurement-")) for seed in range(5) for s in draw(seed=seed)]
    assert min(seeds) >= TRAINING_SEEDS
    assert len(set(seeds)) == 5 * 12


def test_equal_generators_give_equal_draws_and_other_ones_others():
    assert draw(seed=3) == draw(seed=3)
    assert draw(seed=3) != draw(seed=4)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"self_play": 0.8, "past": 0.3}, "past"),
        ({"self_play": 1.2, "past": 0.0}, "self_play"),
        ({"scripted": {"boulware": 1.0}}, "cannot be trained against"),
        ({"scripted": {"firm": 0.0}}, "positive sum"),
        ({"scripted": {"firm": 1.0, "eager": -0.1}}, "positive sum"),
        ({"dialogues": 4}, "dialogues"),
        ({"group_size": 0}, "group_size"),
        ({"league_size": 0}, "league_size"),
        ({"retries": -1}, "retries"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        InteractConfig(**wrong)
