"""bupo.evaluator: the scorecard against scipy and naive sums over teacher-forced proposals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from scipy.stats import entropy

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.evaluator import DynamicEvaluator, EvaluatorConfig, mean_null_kl, mean_pairwise_kl, scorecard_metrics
from bupo.learn.scoring import score

WEIGHTS = (0.5, 0.125, 0.375)


def scorecard(forward, batch, acted, *, weights=WEIGHTS, rows=32, micro_tokens=8192, seed=0):
    mixer = build_coordinator(CoordinatorConfig(weights=weights), len(forward.pool.names))
    evaluator = DynamicEvaluator(EvaluatorConfig(rows=rows), micro_tokens, 0.8)
    return evaluator.scorecard(forward, mixer, batch, acted, torch.Generator().manual_seed(seed))


def proposals(forward, batch, stacks):
    """pi [K, N, V] in numpy, executed tokens, row of each (score itself is proved against PEFT in test_ppo)."""
    with torch.no_grad():
        s = score(forward, batch, stacks, 0.8)
    return s.logp_KNV.exp().double().numpy(), s.ids_N.numpy(), s.row_N.numpy()


@pytest.fixture(scope="module")
def scene():
    """A pool that has moved since it acted."""
    forward = tiny.lockstep()
    acted = forward.stacks().offload()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in forward.pool.names:
            for parameter in forward.pool.parameters(name):
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    batch = tiny.batch()
    return forward, batch, acted, scorecard(forward, batch, acted)


def test_pairwise_kl_equals_scipy_on_the_present_pool(scene):
    forward, batch, _, card = scene
    pi, _, _ = proposals(forward, batch, forward.stacks())
    for i in range(3):
        for j in range(3):
            assert card.pairwise_kl[i][j] == pytest.approx(entropy(pi[i], pi[j], axis=-1).mean(), abs=1e-5)
    others = [card.pairwise_kl[i][j] for i in range(3) for j in range(3) if i != j]
    assert mean_pairwise_kl(card) == pytest.approx(sum(others) / 6)
    assert min(others) > 0.01


def test_divergences_and_entropies_equal_scipy(scene):
    forward, batch, _, card = scene
    pi, _, _ = proposals(forward, batch, forward.stacks())
    mu = np.einsum("k,knv->nv", WEIGHTS, pi)
    each = entropy(pi, axis=-1).mean(-1)
    assert card.jsd == pytest.approx(entropy(pi.mean(0), axis=-1).mean() - each.mean(), abs=1e-5)
    assert card.mixture_entropy == pytest.approx(entropy(mu, axis=-1).mean(), abs=1e-5)
    assert list(card.entropy.values()) == pytest.approx(each, abs=1e-5)
    # E_mu sum_k r_k log(r_k / w_k), summed over the vocabulary
    joint = np.asarray(WEIGHTS)[:, None, None] * pi
    r = joint / mu
    expected = (mu * (r * np.log(r / np.asarray(WEIGHTS)[:, None, None])).sum(0)).sum(-1).mean()
    assert card.jsd_weighted == pytest.approx(expected, abs=1e-5)


def test_null_is_the_kl_of_each_policy_to_itself_when_it_acted(scene):
    forward, batch, acted, card = scene
    now, _, _ = proposals(forward, batch, forward.stacks())
    then, _, _ = proposals(forward, batch, acted)
    expected = [entropy(now[k], then[k], axis=-1).mean() for k in range(3)]
    assert list(card.null_kl.values()) == pytest.approx(expected, abs=1e-5)
    assert mean_null_kl(card) == pytest.approx(np.mean(expected), abs=1e-5)
    assert min(expected) > 1e-4


def test_credit_and_responsibility_are_those_of_the_pool_that_acted(scene):
    forward, batch, acted, card = scene
    pi, ids, _ = proposals(forward, batch, acted)
    at = pi[:, np.arange(len(ids)), ids]
    mu = np.asarray(WEIGHTS) @ at
    r = np.asarray(WEIGHTS)[:, None] * at / mu
    advantage = batch.advantage_BT[batch.action_BT].numpy()
    for k, name in enumerate(card.names):
        assert card.responsibility[name] == pytest.approx(r[k].mean(), abs=1e-5)
        assert card.weight[name] == pytest.approx(WEIGHTS[k], abs=1e-6)
        credit = card.relative_advantage[name]
        expected = (advantage * (r[k] - WEIGHTS[k]) / (1 - WEIGHTS[k])).mean()
        assert credit.mean == pytest.approx(expected, abs=1e-5)
        assert credit.low <= credit.mean <= credit.high
        assert credit.low < credit.high


def test_scorecard_does_not_depend_on_the_micro_batch_split(scene):
    forward, batch, acted, card = scene
    split = scorecard_metrics(scorecard(forward, batch, acted, micro_tokens=64))
    whole = scorecard_metrics(card)
    # The bootstrap draws clusters by number, and the split numbers them anew: interval ends may differ.
    same = {key for key in whole if "_low" not in key and "_high" not in key}
    assert {key: split[key] for key in same} == pytest.approx({key: whole[key] for key in same}, abs=1e-5)


def test_only_the_asked_number_of_rows_is_looked_at(scene):
    forward, batch, acted, _ = scene
    card = scorecard(forward, batch, acted, rows=2, seed=4)
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(4))[:2]
    pi, _, _ = proposals(forward, batch.rows(rows), forward.stacks())
    assert card.pairwise_kl[0][1] == pytest.approx(entropy(pi[0], pi[1], axis=-1).mean(), abs=1e-5)


def test_identical_policies_have_no_diversity_and_count_as_one():
    forward = tiny.lockstep()
    with torch.no_grad():
        for name in ("p01", "p02"):
            for mine, first in zip(forward.pool.parameters(name), forward.pool.parameters("p00"), strict=True):
                mine.copy_(first)
    card = scorecard(forward, tiny.batch(), forward.stacks())
    metrics = scorecard_metrics(card)
    assert card.jsd == pytest.approx(0, abs=1e-5)
    assert metrics["evaluator/effective_policies"] == pytest.approx(1, abs=1e-5)
    assert mean_pairwise_kl(card) == pytest.approx(0, abs=1e-5)
    for name, weight in zip(card.names, WEIGHTS, strict=True):
        assert card.responsibility[name] == pytest.approx(weight, abs=1e-5)
        assert card.relative_advantage[name].mean == pytest.approx(0, abs=1e-5)


def test_a_onehot_coordinator_hides_no_diversity_and_leaves_the_only_speakers_credit_undefined(scene):
    forward, batch, acted, card = scene
    onehot = scorecard(forward, batch, acted, weights=(1.0, 0.0, 0.0))
    assert onehot.jsd == pytest.approx(card.jsd, abs=1e-6)
    assert onehot.relative_advantage["p00"] is None
    assert onehot.relative_advantage["p01"].mean == 0
    assert all(math.isfinite(value) for value in scorecard_metrics(onehot).values())


def test_a_single_policy_has_no_relative_advantage():
    forward = tiny.lockstep(size=1)
    card = scorecard(forward, tiny.batch(), forward.stacks(), weights=())
    assert card.relative_advantage == {"p00": None}
    assert mean_pairwise_kl(card) == 0
    assert scorecard_metrics(card)["evaluator/effective_policies"] == pytest.approx(1, abs=1e-5)


def test_scoring_changes_no_weight_and_leaves_no_gradient():
    forward = tiny.lockstep()
    before = {name: [p.detach().clone() for p in forward.pool.parameters(name)] for name in forward.pool.names}
    batch = tiny.batch()
    kept = replace(batch, ids_BT=batch.ids_BT.clone())
    scorecard(forward, batch, forward.stacks())
    assert torch.equal(kept.ids_BT, batch.ids_BT)
    for name, tensors in before.items():
        for old, new in zip(tensors, forward.pool.parameters(name), strict=True):
            assert torch.equal(old, new)
            assert new.grad is None
