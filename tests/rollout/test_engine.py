"""bupo.rollout.engine: what is sampled is mu, and its log-probabilities are those of a teacher-forced forward."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from scipy import stats
from torch._dynamo.backends.registry import lookup_backend

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn.scoring import score, token_batch
from bupo.policies.cache import DialogueCache
from bupo.policies.lockstep import Lockstep
from bupo.records import Proposal
from bupo.rollout import engine
from bupo.rollout.engine import Decoding, Session, Speaker

WEIGHTS = (0.5, 0.25, 0.25)
OFTEN = tuple(range(5, 40))  # about one token in nine ends a message, so that rows finish at different steps


def session(forward, rows, *, temperature=1.0, max_tokens=16, stop_ids=OFTEN, seed=0, **how):
    stacks = forward.stacks()
    mixer = build_coordinator(CoordinatorConfig(weights=WEIGHTS[: len(stacks)]), len(stacks))
    decoding = Decoding(temperature=temperature, max_tokens=max_tokens, stop_ids=stop_ids, **how)
    streams = [np.random.default_rng([seed, row]) for row in range(rows)]
    return Session(forward, [Speaker(stacks=stacks, coordinator=mixer, streams=streams)], decoding)


def converse(talk, turns, *, seed=0, longest=40, shuffle=False):
    """Several turns in which random subsets of the rows act on random ragged contexts."""
    draw = random.Random(seed)
    ids, action, logp = ([[] for _ in range(talk.rows)] for _ in range(3))
    for turn in range(turns):
        rows = list(range(talk.rows)) if turn % 3 == 0 else draw.sample(range(talk.rows), draw.randint(1, talk.rows))
        rows = rows if shuffle else sorted(rows)
        if shuffle:
            draw.shuffle(rows)
        context = [tiny.random_ids(draw.randint(2, longest), draw.randrange(10**6)) for _ in rows]
        for row, given, span in zip(rows, context, talk.speak(rows, context), strict=True):
            assert span.context_ids == tuple(given)
            assert len(span.action_ids) == len(span.logp_mu) <= talk.decoding.max_tokens
            assert not set(span.action_ids[:-1]) & set(talk.decoding.stop_ids)
            assert span.action_ids[-1] in talk.decoding.stop_ids or len(span.action_ids) == talk.decoding.max_tokens
            assert talk.last_id(row) == span.action_ids[-1]
            ids[row] += [*span.context_ids, *span.action_ids]
            action[row] += [False] * len(given) + [True] * len(span.action_ids)
            logp[row] += [0.0] * len(given) + list(span.logp_mu)
    return token_batch(list(zip(ids, action, logp, strict=True)), [0.0] * talk.rows)


def teacher_forced(talk, batch):
    with torch.no_grad():
        scored = score(talk.lockstep, batch, talk.speakers[0].stacks, talk.decoding.temperature)
        mu = talk.speakers[0].coordinator.combine(Proposal(logp_KNV=scored.logp_KNV)).logp_NV
    return mu.gather(1, scored.ids_N[:, None])[:, 0]


@pytest.fixture
def counted(monkeypatch):
    """Counts compactions of the cache."""
    calls = {"take": 0, "put": 0}
    for name in calls:
        real = getattr(DialogueCache, name)

        def counting(self, *args, name=name, real=real):
            calls[name] += 1
            return real(self, *args)

        monkeypatch.setattr(DialogueCache, name, counting)
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("branch_layers", [1, 2, "all"])
def test_rollout_log_probabilities_equal_teacher_forced_ones(branch_layers, temperature, monkeypatch, counted):
    monkeypatch.setattr(engine, "FIRST_SLOTS", 48)
    talk = session(tiny.lockstep(branch_layers=branch_layers), 6, temperature=temperature)
    batch = converse(talk, turns=9)
    assert talk.slots > 48, "the cache never grew"
    assert counted["put"] > 9, "no batch was ever compacted"
    assert len(set(batch.length_B.tolist())) > 3, "the rows are not ragged"
    torch.testing.assert_close(teacher_forced(talk, batch), batch.logp_rollout_BT[batch.action_BT], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rollout_equals_teacher_forcing_for_every_family_beyond_the_first_slots(family):
    talk = session(tiny.lockstep(family), 4)
    batch = converse(talk, turns=8, longest=90)
    assert int(batch.length_B.max()) > engine.FIRST_SLOTS
    torch.testing.assert_close(teacher_forced(talk, batch), batch.logp_rollout_BT[batch.action_BT], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bf16_rollout_equals_teacher_forcing_within_rounding(family):
    """Stated tolerance: .02 nats on average, .15 at most, where a token's log-probability is about -5."""
    talk = session(tiny.lockstep(family, torch.bfloat16), 4)
    batch = converse(talk, turns=6)
    gap = (teacher_forced(talk, batch) - batch.logp_rollout_BT[batch.action_BT]).abs()
    assert gap.mean() < 0.02 and gap.max() < 0.15


@pytest.fixture
def backend(monkeypatch, request):
    """Compiles with another backend, from scratch; the graphs that it makes."""
    graphs = []

    def noted(graph, inputs):
        graphs.append(graph)
        return lookup_backend(request.param)(graph, inputs)

    monkeypatch.setattr(engine, "BACKEND", noted)
    torch._dynamo.reset()
    engine.compiled_forward.cache_clear()
    yield graphs
    engine.compiled_forward.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_compiled_steps_equal_teacher_forcing_with_a_handful_of_graphs(family, backend):
    talk = session(tiny.lockstep(family), 5, compiled=True)
    batch = converse(talk, turns=8)
    torch.testing.assert_close(teacher_forced(talk, batch), batch.logp_rollout_BT[batch.action_BT], atol=1e-5, rtol=0)
    assert 0 < len(backend) < 8, "each length or number of rows was compiled anew"


def test_rows_may_act_in_any_order():
    talk = session(tiny.lockstep(), 5)
    batch = converse(talk, turns=7, shuffle=True)
    torch.testing.assert_close(teacher_forced(talk, batch), batch.logp_rollout_BT[batch.action_BT], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_dialogues_of_several_pools_in_one_session_are_those_of_each_pool_alone(family):
    """Pools of three, one and two policies; their rows act together and in any order; not all fit merged."""
    forward = tiny.lockstep(family, merge_mb=64.0)
    size = sum(module.base_layer.weight.numel() * 4 for module in forward.pool.modules().values()) / 2**20
    forward.pool.config = replace(forward.pool.config, merge_mb=2.5 * size)
    parts = [(["p00", "p01", "p02"], 3), (["p02"], 2), (["p01", "p00"], 3)]
    speakers = [
        Speaker(
            stacks=forward.stacks(names),
            coordinator=build_coordinator(CoordinatorConfig(weights=WEIGHTS[: len(names)]), len(names)),
            streams=[np.random.default_rng([number, row]) for row in range(rows)],
        )
        for number, (names, rows) in enumerate(parts)
    ]
    assert [bool(speaker.stacks.merged) for speaker in speakers] == [False, True, True]
    together = Session(forward, speakers, Decoding(temperature=1.0, max_tokens=16, stop_ids=OFTEN))
    batch = converse(together, turns=7, shuffle=True)
    ends = np.cumsum([rows for _, rows in parts])
    for speaker, end in zip(speakers, ends, strict=True):
        rows = torch.arange(end - len(speaker.streams), end)
        alone = SimpleNamespace(lockstep=forward, speakers=[speaker], decoding=together.decoding)
        expected = teacher_forced(alone, batch.rows(rows))
        got = batch.logp_rollout_BT[rows][batch.action_BT[rows]]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("merge_mb", [0.0, 64.0], ids=["products", "merged"])
def test_rollout_log_probabilities_equal_peft_run_adapter_by_adapter(merge_mb):
    pool = tiny.pool(merge_mb=merge_mb)
    twin, talk = tiny.peft_twin(pool), session(Lockstep(pool), 4)
    batch = converse(talk, turns=4)
    for row in range(4):
        ids = batch.ids_BT[row, : batch.length_B[row]]
        mu = torch.zeros(len(ids) - 1, len(tiny.tokenizer()), dtype=torch.float64)
        for weight, name in zip(WEIGHTS, pool.names, strict=True):
            twin.set_adapter(name)
            with torch.no_grad():
                mu += weight * torch.softmax(twin(ids[None]).logits[0, :-1].double(), -1)
        where = batch.action_BT[row, 1 : len(ids)].nonzero()[:, 0]
        expected = mu[where, ids[where + 1]].log().float()
        torch.testing.assert_close(batch.logp_rollout_BT[row][batch.action_BT[row]], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shortcut", [False, True])
def test_tokens_are_drawn_from_the_whole_mixture(monkeypatch, shortcut):
    """Chi-square test of 4,000 first tokens against mu: nothing is cut off (top-p 1, top-k off)."""
    monkeypatch.setattr(engine, "FIRST_SLOTS", 8)
    pool = tiny.pool(branch_layers=1)
    forward = Lockstep(pool)
    context = tiny.random_ids(6, 0)
    talk = session(forward, 4000, max_tokens=1, shortcut=shortcut)
    drawn = [span.action_ids[0] for span in talk.speak(range(4000), [context] * 4000)]
    twin = tiny.peft_twin(pool)
    mu = 0
    for weight, name in zip(WEIGHTS, pool.names, strict=True):
        twin.set_adapter(name)
        with torch.no_grad():
            mu = mu + weight * torch.softmax(twin(torch.tensor([context])).logits[0, -1].double(), -1)
    expected = (4000 * mu).numpy()
    seen = torch.bincount(torch.tensor(drawn), minlength=len(mu)).numpy()
    common = expected >= 5
    observed = [*seen[common], seen[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    assert stats.chisquare(observed, wanted).pvalue > 0.01


def test_equal_streams_give_equal_messages_and_others_do_not():
    forward = tiny.lockstep()
    context = [tiny.random_ids(9, 1), tiny.random_ids(5, 2)]
    spans = [session(forward, 2, seed=seed).speak([0, 1], context) for seed in (3, 3, 4)]
    assert spans[0] == spans[1] != spans[2]


def test_message_longer_than_the_limit_is_cut_and_continues_as_it_was_sampled():
    talk = session(tiny.lockstep(), 3, max_tokens=5, stop_ids=())
    batch = converse(talk, turns=5)
    torch.testing.assert_close(teacher_forced(talk, batch), batch.logp_rollout_BT[batch.action_BT], atol=1e-5, rtol=0)


def test_a_row_has_no_last_token_before_its_first_message():
    assert session(tiny.lockstep(), 2).last_id(0) is None


def test_sampling_leaves_no_graph_and_no_gradient():
    talk = session(tiny.lockstep(), 2)
    talk.speak([0, 1], [tiny.random_ids(4, 0)] * 2)
    pool = talk.lockstep.pool
    assert all(parameter.grad is None for name in pool.names for parameter in pool.parameters(name))


def test_new_rows_that_begin_alike_are_prefilled_once_and_sample_as_if_alone(monkeypatch):
    forward = tiny.lockstep(dtype=torch.float64)
    fed, real = [], forward.trunk

    def spy(ids, *args, **kwargs):
        fed.append(tuple(ids.shape))
        return real(ids, *args, **kwargs)

    monkeypatch.setattr(forward, "trunk", spy)
    start, other = tiny.random_ids(30, 1), tiny.random_ids(21, 2)
    context = [[*start, 9], other, [*start, *tiny.random_ids(6, 3)], [*start, *tiny.random_ids(3, 4)]]
    talk = session(forward, 4)
    spans = talk.speak([0, 1, 2, 3], context)
    assert fed[:2] == [(2, 30), (4, 6)]  # the two beginnings, then what remains of each row
    assert talk.length == [len(c) + len(span.action_ids) - 1 for c, span in zip(context, spans, strict=True)]
    rows = [
        (
            [*ids, *span.action_ids],
            [False] * len(ids) + [True] * len(span.action_ids),
            [0.0] * len(ids) + list(span.logp_mu),
        )
        for ids, span in zip(context, spans, strict=True)
    ]
    batch = token_batch(rows, [0.0] * 4)
    expected = teacher_forced(talk, batch)
    torch.testing.assert_close(batch.logp_rollout_BT[batch.action_BT].double(), expected, atol=1e-6, rtol=0)
    again = talk.speak([2, 0], [[8, 9], [7]])  # a later turn continues the shared beginning
    assert len(again) == 2 and talk.length[2] > len(context[2])


def test_draws_follow_the_distribution_and_never_take_what_has_probability_zero():
    p = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    ids = engine.draw(p.log().expand(20_000, -1), torch.from_numpy(np.random.default_rng(0).random(20_000)))
    counts = torch.bincount(ids, minlength=6).numpy()
    assert counts[[0, 2, 5]].sum() == 0
    assert stats.chisquare(counts[[1, 3, 4]], 20_000 * p[[1, 3, 4]].numpy()).pvalue > 1e-3
    edges = torch.tensor([0.0, 0.4999, 0.5001, 0.6999, 0.7001, 1 - 2**-24, 1.0])
    assert engine.draw(p.log().expand(7, -1), edges).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_a_policy_is_chosen_by_its_weight_and_what_is_left_of_the_number_is_uniform_and_independent():
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(20_000, -1)
    chosen, rest = engine.choose(weights, torch.from_numpy(np.random.default_rng(1).random(20_000)))
    counts = torch.bincount(chosen, minlength=4).numpy()
    assert counts[1] == 0 and stats.chisquare(counts[[0, 2, 3]], [10_000, 6_000, 4_000]).pvalue > 1e-3
    for policy in (0, 2, 3):
        assert stats.kstest(rest[chosen == policy].numpy(), "uniform").pvalue > 1e-3


def test_the_shortcut_knows_no_mixture_and_is_left_where_weights_depend_on_proposals(monkeypatch):
    short, plain = (session(tiny.lockstep(), 2, shortcut=True) for _ in range(2))
    context = [tiny.random_ids(5, row) for row in range(2)]
    assert all(np.isnan(span.logp_mu).all() for span in short.speak([0, 1], context))
    monkeypatch.setattr(plain.speakers[0].coordinator, "gate", lambda positions: None)
    assert all(np.isfinite(span.logp_mu).all() for span in plain.speak([0, 1], context))


def test_what_a_row_draws_depends_neither_on_its_company_nor_on_how_long_it_spoke_before():
    forward = tiny.lockstep(dtype=torch.float64)
    context = [tiny.random_ids(7 + row, row) for row in range(5)]
    together, alone = session(forward, 5), session(forward, 5)
    spans = together.speak(range(5), context)
    assert [alone.speak([row], [context[row]])[0].action_ids for row in (3, 1)] == [
        spans[3].action_ids,
        spans[1].action_ids,
    ]
    # The second message takes the same numbers, whatever the first was: streams move by max_tokens a message.
    assert [stream.random() for stream in (together.streams[3], alone.streams[3])] == [
        np.random.default_rng([0, 3]).random(17)[16]
    ] * 2
