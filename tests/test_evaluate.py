"""bupo.evaluate: the frozen protocol, its separation from everything learnt from, and measures by hand."""

import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny import HAND

from bupo.config import ConfigError
from bupo.evaluate import (
    LEARNER,
    Evaluation,
    EvaluationConfig,
    protocol,
    stratified_scenarios,
)
from bupo.learn.demonstrations import HEARD, IMITATED, SFT_SEEDS, scripted_dialogues
from bupo.learn.warmstart import WarmstartConfig
from bupo.measures import MEASURES, Measured, StageResult, measure, measure_all
from bupo.negotiation.dialogue import Dialogue
from bupo.negotiation.frontier import analyse
from bupo.negotiation.opponents import EVALUATION_OPPONENTS, TRAINING_OPPONENTS, TimeDependent
from bupo.negotiation.phrases import EVALUATION_PHRASES, TRAINING_PHRASES
from bupo.negotiation.scenario import ScenarioConfig, fingerprint, procurement
from bupo.rollout.dialogues import Seating
from bupo.selfplay.matchmaking import SCRIPTED_SHARES, TRAINING_SEEDS, InteractConfig, draw_seatings

SCENARIOS = ScenarioConfig()

HAND = replace(HAND, rounds=4, opener=0)


@pytest.fixture(scope="module")
def quick():
    return protocol(SCENARIOS, "quick")


@pytest.fixture(scope="module")
def full():
    return protocol(SCENARIOS, "full")


def seed_of(scenario):
    return int(scenario.name.rpartition("-")[2])


def seat_of(seating):
    return seating.learner.index(True)


def opponent(seating):
    return seating.players[1 - seat_of(seating)]


# --- the protocol ---------------------------------------------------------------------------------------------------


def test_quick_is_the_part_of_full_in_which_each_scenario_meets_each_opponent_once(quick, full):
    assert len(quick.seatings) == 240 and not quick.no_zopa
    cells = Counter((s.scenario.name, opponent(s)) for s in quick.seatings)
    assert len({name for name, _ in cells}) == 60
    assert len(cells) == 60 * 4 and set(cells.values()) == {1}
    roles = Counter((s.scenario.name, seat_of(s)) for s in quick.seatings)
    assert len(roles) == 60 * 2 and set(roles.values()) == {2}
    assert Counter((opponent(s), seat_of(s)) for s in quick.seatings) == {
        (name, seat): 30 for name in EVALUATION_OPPONENTS for seat in (0, 1)
    }
    assert {repr(s) for s in quick.seatings} < {repr(s) for s in full.seatings}
    assert {repr(s) for s in quick.self_play} < {repr(s) for s in full.self_play}


def test_full_is_600_dialogues_with_each_opponent_and_role_equally_often_and_100_without_zopa(full):
    assert len(full.seatings) == 600 and len(full.no_zopa) == 100
    assert len({s.scenario.name for s in full.seatings}) == 60
    assert Counter(map(opponent, full.seatings)) == dict.fromkeys(EVALUATION_OPPONENTS, 150)
    assert Counter(map(seat_of, full.seatings)) == {0: 300, 1: 300}
    cells = Counter((s.scenario.name, seat_of(s), opponent(s)) for s in full.seatings)
    assert len(cells) == 480 and set(cells.values()) <= {1, 2}
    without = Counter((s.scenario.name, seat_of(s)) for s in full.no_zopa)
    assert len(without) == 20 and set(without.values()) == {5}
    assert {opponent(s) for s in full.no_zopa} == set(EVALUATION_OPPONENTS)


@pytest.mark.parametrize("size", ["quick", "full"])
def test_self_play_puts_the_policy_in_both_seats_of_every_scenario(size, request):
    frozen = request.getfixturevalue(size)
    assert {s.players for s in frozen.self_play} == {(LEARNER, LEARNER)}
    assert {s.learner for s in frozen.self_play} == {(True, True)}
    assert {s.scenario.name for s in frozen.self_play} == {s.scenario.name for s in frozen.seatings}


def test_zopa_is_there_where_it_should_be_and_only_there(full):
    assert all(s.scenario.has_zopa() for s in full.seatings)
    assert not any(s.scenario.has_zopa() for s in full.no_zopa)


@pytest.mark.parametrize("size", ["quick", "full"])
def test_every_dialogue_has_its_own_seed_and_the_policy_sits_where_it_says(size, request):
    frozen = request.getfixturevalue(size)
    everything = [*frozen.seatings, *frozen.no_zopa, *frozen.self_play]
    assert len({s.seed for s in everything}) == len(everything)
    for seating in everything:
        assert tuple(name == LEARNER for name in seating.players) == seating.learner


def test_the_protocol_is_the_same_at_every_stage(quick, full):
    assert protocol(SCENARIOS, "quick") == quick
    assert quick.hash != full.hash


def test_the_hash_changes_when_a_number_of_any_scenario_changes(full):
    with_zopa = list({s.scenario.name: s.scenario for s in full.seatings}.values())
    scenarios = [*with_zopa, *(s.scenario for s in full.no_zopa)]
    assert fingerprint(scenarios) == full.hash
    for index in (0, 37, 59, 60, 159):
        scenario = scenarios[index]
        buyer, supplier = scenario.profiles
        changed = replace(scenario, profiles=(buyer, replace(supplier, limit=supplier.limit + 1)))
        assert fingerprint([*scenarios[:index], changed, *scenarios[index + 1 :]]) != full.hash
    assert protocol(ScenarioConfig(min_limit=21), "full").hash != full.hash


def test_scenarios_cover_narrow_and_wide_zones_alike():
    """One of every four neighbours in width: quartiles of the choice match those of the whole pool."""
    pool = [procurement(SCENARIOS, seed) for seed in range(120)]

    def width(scenario):
        limits = [p.limit for p in scenario.profiles]
        return max(
            min(p.score(tuple(o)) - limit for p, limit in zip(scenario.profiles, limits, strict=True))
            for o in scenario.outcomes
        )

    chosen = [width(s) for s in stratified_scenarios(SCENARIOS, 30)]
    order = sorted(map(width, pool))
    assert sorted(chosen) == [order[4 * i + 2] for i in range(30)]


def test_an_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="size"):
        EvaluationConfig(size="huge")


# --- nothing that is learnt from is evaluated on --------------------------------------------------------------------


def test_held_out_seeds_are_disjoint_from_sft_and_training_seeds(quick, full):
    held_out = {seed_of(s.scenario) for p in (quick, full) for s in [*p.seatings, *p.no_zopa, *p.self_play]}
    config = WarmstartConfig()
    most = max(config.dialogues, config.public_dialogues)
    sft = {SFT_SEEDS + config.seed * 100_000 + index for index in range(most)}
    assert {seed_of(d.scenario) for d in scripted_dialogues(40, SCENARIOS, config.seed)} <= sft
    assert not held_out & sft
    assert max(held_out | sft) < TRAINING_SEEDS
    rng = np.random.default_rng(0)
    drawn = draw_seatings(InteractConfig(dialogues=400, group_size=1), SCENARIOS, [], rng)
    assert min(seed_of(s.scenario) for s in drawn) >= TRAINING_SEEDS


def test_no_held_out_scenario_has_the_numbers_of_an_sft_scenario(full):
    def numbers(scenario):
        return scenario.rounds, scenario.opener, tuple((p.points, p.limit) for p in scenario.profiles)

    held_out = {numbers(s.scenario) for s in [*full.seatings, *full.no_zopa]}
    assert not held_out & {numbers(procurement(SCENARIOS, SFT_SEEDS + index)) for index in range(1000)}


def sentences(text):
    """Sentences without actions, case and end marks."""
    text = re.sub(r"\[[^\]]*\]", " ", text.lower())
    return {part.strip() for part in re.split(r"[.!?:;]", text) if part.strip()}


def bank_sentences(bank):
    leads = [lead for tones in bank.leads.values() for texts in tones.values() for lead in texts]
    return set().union(*map(sentences, [*leads, *bank.reasons]))


def test_evaluation_opponents_are_never_met_in_training_or_sft():
    seen = {*TRAINING_OPPONENTS, *HEARD, *IMITATED, *SCRIPTED_SHARES}
    assert not seen & set(EVALUATION_OPPONENTS)
    assert not set(TRAINING_OPPONENTS.values()) & set(EVALUATION_OPPONENTS.values())
    assert {n for d in scripted_dialogues(60, SCENARIOS, 0) for n in d.players} <= set(TRAINING_OPPONENTS)

    def exponents(players):
        return {kind.exponent for kind in players.values() if issubclass(kind, TimeDependent)}

    assert exponents(EVALUATION_OPPONENTS) == {4.0, 1.0, 0.25}
    assert not exponents(TRAINING_OPPONENTS) & exponents(EVALUATION_OPPONENTS)


def test_evaluation_sentences_are_never_heard_in_training_or_sft():
    evaluation = bank_sentences(EVALUATION_PHRASES)
    assert len(evaluation) > 30
    assert not evaluation & bank_sentences(TRAINING_PHRASES)
    texts = [turn.text for d in scripted_dialogues(200, SCENARIOS, 0) for turn in d.turns]
    heard = set().union(*map(sentences, texts))
    assert heard <= bank_sentences(TRAINING_PHRASES)
    assert not evaluation & heard


def test_both_banks_speak_in_every_situation_and_tone_and_never_with_brackets():
    for bank in (TRAINING_PHRASES, EVALUATION_PHRASES):
        assert set(bank.leads) == {"open", "concede", "hold", "accept", "walk"}
        for tones in bank.leads.values():
            assert set(tones) == {"warm", "plain", "hard"} and all(tones.values())
        assert not any(mark in text for text in bank_sentences(bank) for mark in "[]")


# --- measures -------------------------------------------------------------------------------------------------------


def talked(*texts):
    dialogue = Dialogue(HAND, (LEARNER, "linear"))
    for text in texts:
        dialogue.take(text)
    return dialogue.episode()


def seating(seat=0, scenario=HAND, name="linear"):
    players = (LEARNER, name) if seat == 0 else (name, LEARNER)
    return Seating(scenario=scenario, players=players, seed=0, learner=(seat == 0, seat == 1))


HIGH, LOW, PARETO, WASTE = (
    f"[Offer: price={p}, days={d}]" for p, d in ((30, 1), (10, 2), (10, 1), (30, 2))
)  # (2,0), (0,1), (0,0), (2,1)


def test_measures_of_a_deal_by_hand():
    episode = talked("hm", LOW, HIGH, PARETO, "[Accept]")
    seen = measure(seating(0), episode, 0, analyse(HAND))
    assert tuple(seen) == MEASURES
    assert seen == pytest.approx(
        {
            "payoff": 0.6,
            "payoff_agreed_only": 0.6,
            "opponent_payoff": 0.5,
            "surplus_share": 20 / 60,
            "opponent_surplus_share": 20 / 70,
            "agreement_rate": 1,
            "rounds": 2,
            "valid_message_rate": 2 / 3,
            "irrational_deals": 0,
            "nash_ratio": 1,
            "pareto_distance": 0,
        }
    )
    other = measure(seating(1), episode, 1, analyse(HAND))
    assert (other["payoff"], other["opponent_payoff"], other["valid_message_rate"]) == pytest.approx((0.5, 0.6, 1))


def test_measures_of_a_wasteful_and_of_an_irrational_deal_by_hand():
    waste = measure(seating(0), talked(LOW, WASTE, "[Accept]"), 0, analyse(HAND))
    assert waste["pareto_distance"] == pytest.approx(0.2)  # 40/50 against 60/50
    assert (waste["nash_ratio"], waste["irrational_deals"]) == (0, 0)
    caved = measure(seating(0), talked(LOW, HIGH, "[Accept]"), 0, analyse(HAND))
    assert (caved["payoff"], caved["irrational_deals"], caved["nash_ratio"]) == (0, 1, 0)
    assert caved["surplus_share"] == pytest.approx(-40 / 60)
    # The other side's irrational deal is not counted against this seat.
    assert measure(seating(1), talked(LOW, HIGH, "[Accept]"), 1, analyse(HAND))["irrational_deals"] == 0


def test_measures_without_a_deal_by_hand():
    seen = measure(seating(0), talked(LOW, "[Walk]"), 0, analyse(HAND))
    assert (seen["payoff"], seen["opponent_payoff"]) == pytest.approx((0.4, 0.3))
    assert (seen["agreement_rate"], seen["rounds"], seen["surplus_share"]) == (0, 1, 0)
    assert all(math.isnan(seen[key]) for key in ("payoff_agreed_only", "nash_ratio", "pareto_distance"))
    never = measure(seating(1), talked("?", "?"), 1, analyse(HAND))
    assert math.isnan(never["valid_message_rate"])  # it never had a turn


def measured():
    seatings = [
        seating(0),
        seating(1, name="conceder"),
        replace(seating(), players=(LEARNER,) * 2, learner=(True,) * 2),
    ]
    episodes = [talked(LOW, PARETO, "[Accept]"), talked(LOW, "[Walk]"), talked(LOW, HIGH, "[Accept]")]
    return measure_all(seatings, episodes, {"hand": analyse(HAND)})


def test_measure_all_takes_each_seat_that_the_policy_held():
    seen = measured()
    assert len(seen) == 4
    assert seen.opponent.tolist() == ["linear", "conceder", LEARNER, LEARNER]
    assert seen.values["payoff"] == pytest.approx([0.6, 0.3, 0.0, 1.0])
    assert seen.where("conceder").values["payoff"] == pytest.approx([0.3])


def test_means_skip_what_is_undefined():
    summary = measured().summary()
    assert summary["payoff"]["mean"] == pytest.approx((0.6 + 0.3 + 0 + 1) / 4)
    assert summary["payoff_agreed_only"]["mean"] == pytest.approx((0.6 + 0 + 1) / 3)
    assert summary["agreement_rate"]["mean"] == pytest.approx(3 / 4)


def same(a, b):
    return (
        a.values.keys() == b.values.keys()
        and all(np.array_equal(a.values[k], b.values[k], equal_nan=True) for k in a.values)
        and a.scenario.tolist() == b.scenario.tolist()
        and a.opponent.tolist() == b.opponent.tolist()
    )


def test_measured_survives_strict_json_with_nan():
    before = measured()
    assert np.isnan(before.values["nash_ratio"]).any()
    after = Measured.from_state(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    assert same(before, after)
    assert after.summary() == before.summary()


@pytest.mark.parametrize("no_zopa", [True, False])
def test_a_stage_result_survives_strict_json(no_zopa):
    part = measured()
    before = StageResult(
        scripted=part, no_zopa=part.where("linear") if no_zopa else None, self_play=part.where(LEARNER)
    )
    after = StageResult.from_state(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    assert same(before.scripted, after.scripted) and same(before.self_play, after.self_play)
    assert same(before.no_zopa, after.no_zopa) if no_zopa else after.no_zopa is None
    assert json.dumps(after.summary()) == json.dumps(before.summary())
    assert ("no_zopa" in after.summary()) == no_zopa


@pytest.fixture(scope="module")
def evaluation():
    return Evaluation(EvaluationConfig(), SCENARIOS, tracker=None)  # type: ignore[arg-type]


def test_no_scripted_yardstick_beats_the_ceiling_and_steady_play_comes_half_way(evaluation):
    seen = evaluation.yardstick("firm")
    ceiling = np.array([evaluation.analyses[s.scenario.name].ceiling[seat_of(s)] for s in evaluation.protocol.seatings])
    assert len(seen) == 240
    assert (seen.values["payoff"] <= ceiling + 1e-9).all()
    assert evaluation.ceiling()["mean"] == pytest.approx(ceiling.mean())
    floor = np.array([s.scenario.profiles[seat_of(s)].limit / 100 for s in evaluation.protocol.seatings])
    assert seen.values["payoff"].mean() > floor.mean()
    assert not seen.values["irrational_deals"].any()
    assert (seen.values["valid_message_rate"] == 1).all()


def test_the_ceiling_is_the_best_rational_deal_that_the_other_side_can_take(evaluation):
    for s in evaluation.protocol.seatings[:24]:
        own, other = s.scenario.profiles[seat_of(s)], s.scenario.profiles[1 - seat_of(s)]
        grid = [tuple(o) for o in s.scenario.outcomes]
        best = max(own.score(o) for o in grid if other.score(o) >= other.limit and own.score(o) >= own.limit)
        assert evaluation.analyses[s.scenario.name].ceiling[seat_of(s)] == pytest.approx(best / 100)


def test_a_stage_compared_with_itself_differs_by_nothing(evaluation):
    part = evaluation.yardstick("eager")
    stage = StageResult(scripted=part, no_zopa=None, self_play=part)
    for difference in evaluation.paired(stage, stage).values():
        assert difference["mean"] == 0


def test_yardsticks_play_the_same_talk_on_the_same_seed(evaluation):
    assert same(evaluation.yardstick("random"), evaluation.yardstick("random"))
