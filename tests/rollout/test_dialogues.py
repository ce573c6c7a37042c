"""bupo.rollout.dialogues: every seat speaks with its own pool, sees its own dialogue, and keeps its sampled ids."""

import itertools

import numpy as np
import pytest
import tiny
import torch

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn.scoring import score, token_batch
from bupo.negotiation.dialogue import Dialogue, play
from bupo.negotiation.opponents import seat_player
from bupo.negotiation.scenario import ScenarioConfig, procurement
from bupo.policies.lockstep import Lockstep
from bupo.records import Proposal
from bupo.rollout.dialogues import Seating, Table, play_dialogues
from bupo.rollout.engine import Decoding

SCENARIOS = [procurement(ScenarioConfig(), seed) for seed in range(4)]


def table(forward, *, retries=3, max_tokens=10, stop_ids=None):
    chat = forward.pool.base.chat
    decoding = Decoding(temperature=1.0, max_tokens=max_tokens, stop_ids=stop_ids or chat.stop_ids)
    return Table(lockstep=forward, chat=chat, decoding=decoding, retries=retries)


def uniform(policies):
    return build_coordinator(CoordinatorConfig(), policies)


@pytest.fixture(scope="module")
def forward():
    return Lockstep(tiny.pool())


@pytest.fixture(scope="module")
def played(forward):
    """Self-play, pool against pool and pool against script, in one batch."""
    pools = {
        "pool": (forward.stacks(["p00", "p01"]), uniform(2)),
        "past": (forward.stacks(["p02"]), uniform(1)),
    }
    pairs = [
        ("pool", "pool"),
        ("pool", "past"),
        ("past", "pool"),
        ("firm", "pool"),
        ("pool", "eager"),
        ("firm", "eager"),
    ]
    seatings = [
        Seating(scenario=SCENARIOS[index % 4], players=pair, seed=index, learner=tuple(p == "pool" for p in pair))
        for index, pair in enumerate(pairs)
    ]
    done = []
    episodes = play_dialogues(table(forward, stop_ids=(1, *range(5, 60))), seatings, pools, 0, done.append)
    return pools, seatings, episodes, done


def spans_of(episode, seat):
    return [turn.tokens for turn in episode.turns if turn.seat == seat and turn.tokens is not None]


def test_there_is_one_finished_episode_a_seating_in_order(played):
    _, seatings, episodes, done = played
    assert [e.scenario for e in episodes] == [s.scenario.name for s in seatings]
    assert [e.players for e in episodes] == [s.players for s in seatings]
    assert all(e.status in ("deal", "walk", "timeout", "invalid") for e in episodes)
    assert done[-1] == len(seatings)
    assert all(a <= b for a, b in itertools.pairwise(done))


def test_only_pools_leave_tokens(played):
    pools, _, episodes, _ = played
    for episode in episodes:
        for turn in episode.turns:
            assert (turn.tokens is not None) == (episode.players[turn.seat] in pools)


def test_every_seat_was_scored_by_its_own_pool_on_its_own_dialogue(forward, played):
    pools, _, episodes, _ = played
    checked = 0
    for episode, seat in itertools.product(episodes, (0, 1)):
        if not (spans := spans_of(episode, seat)):
            continue
        ids = [i for s in spans for i in (*s.context_ids, *s.action_ids)]
        action = [x for s in spans for x in [False] * len(s.context_ids) + [True] * len(s.action_ids)]
        stacks, mixer = pools[episode.players[seat]]
        with torch.no_grad():
            scored = score(forward, token_batch([(ids, action, [0.0] * len(ids))], [0.0]), stacks, 1.0)
            mu = mixer.combine(Proposal(logp_KNV=scored.logp_KNV)).logp_NV
        got = mu.gather(1, scored.ids_N[:, None])[:, 0]
        expected = torch.tensor([x for s in spans for x in s.logp_mu])
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
        checked += len(expected)
    assert checked > 50


def test_context_is_what_the_mechanism_shows_the_seat_and_text_is_what_was_sampled(forward, played):
    _, seatings, episodes, _ = played
    chat = forward.pool.base.chat
    several = 0
    for seating, episode in zip(seatings, episodes, strict=True):
        again, last = Dialogue(seating.scenario, seating.players, 3), {}
        for turn in episode.turns:
            assert again.seat == turn.seat
            if turn.tokens is not None:
                prompt = again.prompt()
                if turn.seat in last:
                    expected, several = chat.extend(prompt, last[turn.seat]), several + 1
                else:
                    expected = chat.open(again.system(turn.seat), prompt)
                assert list(turn.tokens.context_ids) == expected
                assert chat.text(turn.tokens.action_ids) == turn.text
                last[turn.seat] = turn.tokens.action_ids[-1]
            again.take(turn.text)
    assert several > 5, "no dialogue went on for several turns"


def test_scripted_dialogues_equal_plain_play(forward):
    seatings = [
        Seating(scenario=scenario, players=("firm", "eager"), seed=seed) for seed, scenario in enumerate(SCENARIOS)
    ]
    got = play_dialogues(table(forward, retries=1), seatings, {}, 0)
    for seating, episode in zip(seatings, got, strict=True):
        rng = np.random.default_rng([seating.seed, 0x5C])
        talkers = tuple(seat_player(name, seating.scenario, seat, rng) for seat, name in enumerate(seating.players))
        assert episode == play(seating.scenario, seating.players, talkers).episode()


def test_equal_seeds_give_equal_episodes(forward):
    pools = {"pool": (forward.stacks(), uniform(3))}
    seatings = [Seating(scenario=s, players=("pool", "pool"), seed=0) for s in SCENARIOS]
    one, same, other = (play_dialogues(table(forward, retries=1), seatings, pools, seed) for seed in (1, 1, 2))
    assert one == same != other


def test_nonsense_of_a_model_is_an_invalid_episode_and_no_exception(forward):
    seating = Seating(scenario=SCENARIOS[0], players=("pool", "pool"), seed=0)
    pools = {"pool": (forward.stacks(), uniform(3))}
    (episode,) = play_dialogues(table(forward, retries=2), [seating], pools, 0)
    assert episode.status == "invalid"
    assert episode.blame == SCENARIOS[0].opener
    assert len(episode.turns) == 3
    assert episode.surplus == (0.0, 0.0)
