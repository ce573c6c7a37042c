"""bupo.learn.objectives against scipy, exact enumeration and hand computation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn.objectives import clipped_surrogate, difference_credit, entropy, jensen_shannon, kl, pairwise_kl
from bupo.records import Proposal

WEIGHTS = (0.5, 0.125, 0.375)
K, N, V = 3, 5, 9


def policies(seed=0, k=K, scale=2.0):
    return softmax(np.random.default_rng(seed).normal(0, scale, size=(k, N, V)), axis=-1)


def log(pi):
    return torch.tensor(np.log(pi))


def responsibility(pi, weights):
    joint = np.asarray(weights)[:, None, None] * pi
    return joint / joint.sum(0)


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0, 0.5, 2.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    loss, got = clipped_surrogate(ratio.log(), torch.zeros(7), advantage, 0.2)
    torch.testing.assert_close(got, ratio)
    torch.testing.assert_close(loss, -torch.tensor([0.5, 0.9, 1.0, 1.1, 1.2, -0.8, -2.0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"), [(1.5, 1.0, False), (0.5, -1.0, False), (0.5, 1.0, True), (1.5, -1.0, True)]
)
def test_gradient_stops_only_where_the_ratio_has_gone_too_far_the_wanted_way(ratio, advantage, flows):
    logp = torch.tensor([ratio]).log().requires_grad_()
    clipped_surrogate(logp, torch.zeros(1), torch.tensor([advantage]), 0.2)[0].sum().backward()
    assert logp.grad.item() == pytest.approx(-ratio * advantage if flows else 0.0)


def test_entropy_and_kl_equal_scipy():
    p, q = policies(0), policies(1)
    np.testing.assert_allclose(entropy(log(p)).numpy(), scipy_entropy(p, axis=-1), rtol=1e-12)
    np.testing.assert_allclose(kl(log(p), log(q)).numpy(), scipy_entropy(p, q, axis=-1), rtol=1e-12)


def test_pairwise_kl_equals_scipy_pair_by_pair():
    pi = policies()
    got = pairwise_kl(log(pi)).numpy()
    for i, j in itertools.product(range(K), repeat=2):
        assert got[i, j] == pytest.approx(scipy_entropy(pi[i], pi[j], axis=-1).mean(), abs=1e-12)


def test_jensen_shannon_of_two_policies_equals_scipy():
    pi = policies(k=2)
    expected = jensenshannon(pi[0], pi[1], axis=-1) ** 2
    np.testing.assert_allclose(jensen_shannon(log(pi)).numpy(), expected, atol=1e-7)


def test_jensen_shannon_with_weights_is_the_mean_kl_to_the_mixture():
    rng = np.random.default_rng(3)
    pi, weights = rng.dirichlet(np.ones(V), size=(3, N)), rng.dirichlet(np.ones(3), size=N)
    mean = np.einsum("nk,knv->nv", weights, pi)
    expected = np.einsum("nk,knv->n", weights, pi * np.log(pi / mean))
    got = jensen_shannon(torch.tensor(np.log(pi)), torch.tensor(weights))
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def test_a_policy_without_weight_has_no_part_in_the_divergence():
    logits = torch.randn(3, N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(N, 3)
    got = jensen_shannon(torch.log_softmax(logits, -1), weights)
    got.sum().backward()
    torch.testing.assert_close(got, jensen_shannon(torch.log_softmax(logits[:2], -1)))
    assert (logits.grad[2] == 0).all() and (logits.grad[:2] != 0).any()


@given(seed=st.integers(0, 10_000), k=st.integers(1, 6), scale=st.floats(0, 30))
@settings(max_examples=80)
def test_jensen_shannon_lies_between_zero_and_log_k(seed, k, scale):
    got = jensen_shannon(torch.log_softmax(torch.tensor(np.random.default_rng(seed).normal(0, scale, (k, N, V))), -1))
    assert (got > -1e-6).all()
    assert (got < np.log(k) + 1e-6).all()


def test_identical_policies_have_no_divergence_and_count_as_one():
    logp = log(policies(k=1)).expand(4, -1, -1)
    torch.testing.assert_close(jensen_shannon(logp), torch.zeros(N, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(pairwise_kl(logp), torch.zeros(4, 4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(jensen_shannon(logp).exp(), torch.ones(N, dtype=torch.float64), atol=1e-6, rtol=0)


def test_disjoint_policies_count_as_k():
    logits = torch.full((3, 1, 3), -200.0)
    logits[[0, 1, 2], 0, [0, 1, 2]] = 0.0
    torch.testing.assert_close(jensen_shannon(torch.log_softmax(logits, -1)).exp(), torch.tensor([3.0]))


@pytest.mark.parametrize("weights", [WEIGHTS, (0.25, 0.75, 0.0), (1.0, 0.0, 0.0)])
def test_weighted_divergence_equals_expected_log_responsibility_over_weight(weights):
    """H(mu) - sum w H(pi) == E_mu sum r log(r / w), the sum over the vocabulary done exactly."""
    pi = policies()
    mixture = build_coordinator(CoordinatorConfig(weights=weights), K).combine(Proposal(logp_KNV=log(pi)))
    left = entropy(mixture.logp_NV) - (mixture.weights_NK.T * entropy(log(pi))).sum(0)
    mu = np.einsum("k,knv->nv", weights, pi)
    expected = np.zeros(N)
    for n, a in itertools.product(range(N), range(V)):
        for k, w in enumerate(weights):
            r = w * pi[k, n, a] / mu[n, a]
            expected[n] += mu[n, a] * r * np.log(r / w) if w > 0 else 0.0
    np.testing.assert_allclose(left.numpy(), expected, atol=1e-10)


def test_mean_difference_credit_is_what_the_mixture_gains_by_having_the_policy():
    """Exact enumeration: E_mu[credit_k] == E_mu[A] - E_mu_-k[A] for any advantage of the tokens."""
    pi, advantage = policies(3), np.random.default_rng(4).normal(size=(N, V))
    mu = np.einsum("k,knv->nv", WEIGHTS, pi)
    r = responsibility(pi, WEIGHTS)
    mean = np.zeros((N, K))
    for n in range(N):
        credit = difference_credit(
            torch.tensor(advantage[n]), torch.tensor(r[:, n].T), torch.tensor([WEIGHTS] * V, dtype=torch.float64)
        )
        mean[n] = mu[n] @ credit.numpy()
    for k, w in enumerate(WEIGHTS):
        without = sum(WEIGHTS[j] * pi[j] for j in range(K) if j != k) / (1 - w)
        expected = (mu * advantage).sum(-1) - (without * advantage).sum(-1)
        np.testing.assert_allclose(mean[:, k], expected, atol=1e-12)


def test_difference_credit_is_undefined_for_the_only_policy():
    got = difference_credit(torch.ones(2), torch.ones(2, 1), torch.ones(2, 1))
    assert got.isnan().all()
    got = difference_credit(torch.ones(1), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    assert got[0, 0].isnan()
    assert got[0, 1] == 0
