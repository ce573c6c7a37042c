"""bupo.coordinators: what is executed is a distribution, and its gradient is the one that the design states."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from bupo.coordinators import COORDINATORS, CoordinatorConfig, build_coordinator
from bupo.records import Proposal

WEIGHTS = (0.5, 0.125, 0.375)  # exact in binary
K, N, V = 3, 4, 11


def random_logits(seed=0, k=K):
    return torch.tensor(np.random.default_rng(seed).normal(0, 2, size=(k, N, V)))


def coordinator(weights=WEIGHTS, policies=K, name="linear"):
    return build_coordinator(CoordinatorConfig(name=name, weights=weights), policies)


def log_mu(logits_KNV, weights=WEIGHTS):
    proposal = Proposal(logp_KNV=torch.log_softmax(logits_KNV, -1))
    return coordinator(weights, logits_KNV.shape[0]).combine(proposal).logp_NV


@pytest.mark.parametrize("name", COORDINATORS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6), scale=st.floats(0.01, 40))
@settings(max_examples=50)
def test_executed_distribution_and_weights_and_responsibilities_sum_to_one(name, seed, k, scale):
    rng = np.random.default_rng(seed)
    proposal = Proposal(logp_KNV=torch.log_softmax(scale * random_logits(seed, k), -1))
    pool = coordinator(tuple(rng.uniform(0.1, 5, size=k)), k, name)
    mixture = pool.combine(proposal)
    ones = torch.ones(N, dtype=torch.float64)
    torch.testing.assert_close(mixture.logp_NV.exp().sum(-1), ones, atol=1e-6, rtol=0)
    torch.testing.assert_close(mixture.weights_NK.sum(-1), ones, atol=1e-6, rtol=0)
    actions = torch.tensor(rng.integers(V, size=N))
    responsibility = pool.responsibilities(proposal, mixture, actions)
    if responsibility is not None:
        torch.testing.assert_close(responsibility.sum(-1), ones, atol=1e-6, rtol=0)
        assert (responsibility >= 0).all()


def test_linear_pool_is_the_weighted_mean_of_the_proposals():
    logits = random_logits()
    expected = np.einsum("k,knv->nv", WEIGHTS, softmax(logits.numpy(), axis=-1))
    np.testing.assert_allclose(log_mu(logits).exp().numpy(), expected, rtol=1e-12)


def test_responsibility_is_bayes_rule():
    logits, actions = random_logits(), torch.tensor([0, 3, 10, 7])
    pi = softmax(logits.numpy(), axis=-1)
    joint = np.stack([[w * pi[k, n, a] for k, w in enumerate(WEIGHTS)] for n, a in enumerate(actions.tolist())])
    proposal, pool = Proposal(logp_KNV=torch.log_softmax(logits, -1)), coordinator()
    got = pool.responsibilities(proposal, pool.combine(proposal), actions)
    np.testing.assert_allclose(got.numpy(), joint / joint.sum(1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("weights", [WEIGHTS, (1.0, 0.0, 0.0), (0.25, 0.75, 0.0)])
def test_gradient_of_log_mu_is_responsibility_times_onehot_minus_proposal(weights):
    logits = random_logits().requires_grad_()
    pi = softmax(logits.detach().numpy(), axis=-1)
    for n, a in enumerate([0, 3, 10, 7]):
        gradient = torch.autograd.grad(log_mu(logits, weights)[n, a], logits)[0].numpy()
        mu = sum(w * pi[k, n, a] for k, w in enumerate(weights))
        expected = np.zeros_like(pi)
        for k, w in enumerate(weights):
            expected[k, n] = w * pi[k, n, a] / mu * (np.eye(V)[a] - pi[k, n])
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_gradient_of_log_mu_equals_finite_differences():
    logits = random_logits()
    for n, a in enumerate([0, 3, 10, 7]):
        variable = logits.clone().requires_grad_()
        gradient = torch.autograd.grad(log_mu(variable)[n, a], variable)[0]
        numeric, step = torch.zeros_like(logits), 1e-5
        for index in np.ndindex(*logits.shape):
            up, down = logits.clone(), logits.clone()
            up[index] += step
            down[index] -= step
            numeric[index] = (log_mu(up)[n, a] - log_mu(down)[n, a]) / (2 * step)
        torch.testing.assert_close(gradient, numeric, atol=1e-9, rtol=1e-6)


def test_equal_proposals_give_the_proposal_and_responsibilities_equal_the_weights():
    logp = torch.log_softmax(random_logits(k=1), -1).expand(K, -1, -1)
    pool, proposal = coordinator(), Proposal(logp_KNV=logp)
    mixture = pool.combine(proposal)
    torch.testing.assert_close(mixture.logp_NV, logp[0])
    got = pool.responsibilities(proposal, mixture, torch.tensor([1, 2, 3, 4]))
    torch.testing.assert_close(got, torch.tensor([WEIGHTS] * N, dtype=torch.float64))


def test_a_single_policy_is_the_identity():
    logp = torch.log_softmax(random_logits(k=1), -1)
    torch.testing.assert_close(coordinator((), 1).combine(Proposal(logp_KNV=logp)).logp_NV, logp[0], atol=0, rtol=0)


def test_onehot_weight_gives_that_policy_alone():
    logits = random_logits()
    torch.testing.assert_close(log_mu(logits, (0.0, 3.0, 0.0)), torch.log_softmax(logits[1], -1), atol=0, rtol=0)


def test_weights_have_no_scale_and_default_to_uniform():
    logits = random_logits()
    torch.testing.assert_close(log_mu(logits, (8.0, 2.0, 6.0)), log_mu(logits), atol=0, rtol=0)
    expected = softmax(logits.numpy(), axis=-1).mean(0)
    np.testing.assert_allclose(log_mu(logits, ()).exp().numpy(), expected, rtol=1e-6)


def test_number_of_weights_must_be_the_number_of_policies():
    with pytest.raises(ValueError, match="2 numbers for 3 sub-policies"):
        coordinator((1.0, 2.0))


@pytest.mark.parametrize("weights", [(-1.0, 2.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_numbers_that_are_no_weights_are_refused(weights):
    with pytest.raises(ValueError, match="are not weights"):
        CoordinatorConfig(weights=weights)


def test_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="linear"):
        CoordinatorConfig(name="liner")
