"""bupo.learn.critic against hand sums and an independent solver."""

import numpy as np
import pytest

from bupo.learn.critic import RIDGE, fit_values, turn_advantages


def test_with_lambda_one_the_advantage_is_the_reward_less_the_value():
    values = [np.array([0.2, 0.5, 0.1]), np.array([0.4])]
    got = turn_advantages(np.array([1.0, 0.0]), values, 1.0)
    np.testing.assert_allclose(got[0], [0.8, 0.5, 0.9])
    np.testing.assert_allclose(got[1], [-0.4])


def test_with_lambda_zero_it_is_the_change_of_value():
    got = turn_advantages(np.array([1.0]), [np.array([0.2, 0.5, 0.1])], 0.0)
    np.testing.assert_allclose(got[0], [0.3, -0.4, 0.9])


def test_in_between_by_hand():
    (got,) = turn_advantages(np.array([1.0]), [np.array([0.2, 0.6])], 0.5)
    np.testing.assert_allclose(got, [0.4 + 0.5 * 0.4, 0.4])


def test_values_solve_the_ridge_problem_around_the_group_mean():
    rng = np.random.default_rng(0)
    states = [rng.normal(size=(t, 3)) for t in (2, 4, 1, 3)]
    reward, mean = rng.normal(size=4), np.array([0.1, 0.1, -0.2, -0.2])
    lengths = [len(s) for s in states]
    phi = np.concatenate(states)
    x = (phi - phi.mean(0)) / phi.std(0)
    # Ridge as ordinary least squares with one pseudo-observation a weight.
    stacked = np.concatenate([x, np.sqrt(RIDGE * len(x)) * np.eye(3)])
    target = np.concatenate([np.repeat(reward - mean, lengths), np.zeros(3)])
    weights = np.linalg.lstsq(stacked, target, rcond=None)[0]
    expected = np.repeat(mean, lengths) + x @ weights
    np.testing.assert_allclose(np.concatenate(fit_values(reward, mean, states)), expected, atol=1e-10)


def test_a_constant_feature_is_harmless():
    states = [np.ones((2, 1)), np.ones((1, 1))]
    values = fit_values(np.array([1.0, 0.0]), np.array([0.5, 0.5]), states)
    assert np.concatenate(values) == pytest.approx([0.5, 0.5, 0.5])
