"""bupo.learn.critic against hand sums, an independent solver and a small world whose values are known."""

import numpy as np
import pytest

from bupo.learn.critic import FEWEST, RIDGE, TurnCritic, explained, ridge, turn_advantages


def test_with_lambda_one_the_advantage_is_the_reward_less_the_value():
    before, after = [np.array([0.2, 0.5, 0.1]), np.array([0.4])], [np.array([9.0, 8.0, 7.0]), np.array([6.0])]
    got = turn_advantages(np.array([1.0, 0.0]), before, after, 1.0)
    np.testing.assert_allclose(got[0], [0.8, 0.5, 0.9])
    np.testing.assert_allclose(got[1], [-0.4])


def test_with_lambda_zero_it_is_what_the_message_changed():
    before, after = [np.array([0.2, 0.5, 0.1])], [np.array([0.3, 0.4, 0.9])]
    got = turn_advantages(np.array([1.0]), before, after, 0.0)
    np.testing.assert_allclose(got[0], [0.1, -0.1, 0.8])


def test_in_between_by_hand():
    # Differences: .3 - .2, .6 - .3, .4 - .6, 1 - .4.
    (got,) = turn_advantages(np.array([1.0]), [np.array([0.2, 0.6])], [np.array([0.3, 0.4])], 0.5)
    np.testing.assert_allclose(got, [0.1 + 0.5 * 0.3 + 0.25 * -0.2 + 0.125 * 0.6, -0.2 + 0.5 * 0.6])


def critic(window=8, situation=None):
    return TurnCritic(design=lambda x: x, situation=situation or (lambda x: np.zeros(len(x), dtype=int)), window=window)


def test_ridge_against_least_squares_with_pseudo_observations():
    rng = np.random.default_rng(0)
    x, y, judged = rng.normal(size=(10, 3)), rng.normal(size=10), rng.normal(size=(4, 3))
    z = (x - x.mean(0)) / x.std(0)
    stacked = np.concatenate([z, np.sqrt(RIDGE * len(z)) * np.eye(3)])
    weights = np.linalg.lstsq(stacked, np.concatenate([y - y.mean(), np.zeros(3)]), rcond=None)[0]
    np.testing.assert_allclose(ridge(x, y, judged), y.mean() + (judged - x.mean(0)) / x.std(0) @ weights, atol=1e-10)


def test_a_constant_feature_is_harmless():
    got = ridge(np.ones((3, 1)), np.array([1.0, 0.0, 0.5]), np.ones((2, 1)))
    assert got == pytest.approx([0.5, 0.5])


def world(rng, rows):
    """Two own turns: each says x, the reply adds noise that nothing tells beforehand; the reward is the sum.

    Features: what was said so far, what was replied so far, both known from then on.
    """
    said, noise = rng.normal(size=(rows, 2)), rng.normal(size=(rows, 2))
    before = [np.array([[0, 0], [s[0], e[0]]]) for s, e in zip(said, noise, strict=True)]
    after = [np.array([[s[0], 0], [s[0] + s[1], e[0]]]) for s, e in zip(said, noise, strict=True)]
    return said, said.sum(1) + noise.sum(1), before, after


def test_a_messages_own_part_is_told_from_the_noise_of_the_reply():
    rng = np.random.default_rng(0)
    judge = critic()
    for _ in range(8):
        said, reward, before, after = world(rng, 200)
        values, followed = judge.judge(reward, np.zeros(200), before, after)
    alone = np.array(turn_advantages(reward, values, followed, 0.0))
    whole = np.array(turn_advantages(reward, values, followed, 1.0))
    # By construction the value of saying x is x.
    assert np.corrcoef(alone.ravel(), said.ravel())[0, 1] > 0.97
    assert np.corrcoef(whole.ravel(), said.ravel())[0, 1] < 0.75
    # V knows half of the variance on the second turn, nothing on the first; Q knows 1/4 and then 3/4.
    assert explained(reward, np.zeros(200), values) == pytest.approx(0.25, abs=0.08)
    assert explained(reward, np.zeros(200), followed) == pytest.approx(0.5, abs=0.08)


def test_values_stand_on_the_mean_of_the_group():
    _, reward, before, after = world(np.random.default_rng(1), 50)
    mean = np.full(50, 7.0)
    at_zero = critic(window=1).judge(reward, np.zeros(50), before, after)
    at_seven = critic(window=1).judge(reward + 7, mean, before, after)
    for low, high in zip(at_zero, at_seven, strict=True):
        np.testing.assert_allclose(np.concatenate(high), np.concatenate(low) + 7, atol=1e-9)


def test_only_the_window_is_remembered_and_a_checkpoint_restores_it():
    rng = np.random.default_rng(2)
    early, late = critic(window=2), critic(window=2)
    batches = [world(rng, 20)[1:] for _ in range(4)]
    for reward, before, after in batches[:3]:
        early.judge(reward, np.zeros(20), before, after)
    for reward, before, after in batches[1:3]:
        late.judge(reward, np.zeros(20), before, after)
    restored = critic(window=2)
    restored.restore(early.state())
    reward, before, after = batches[3]
    expected = late.judge(reward, np.zeros(20), before, after)
    for other in (early, restored):
        got = other.judge(reward, np.zeros(20), before, after)
        np.testing.assert_array_equal(np.concatenate(got[1]), np.concatenate(expected[1]))
        assert len(other.memory) == 2


def test_each_situation_has_its_own_fit_and_a_rare_one_none():
    rng = np.random.default_rng(3)
    kinds = np.array([0] * 60 + [1] * 60 + [2] * (FEWEST - 1))
    x = rng.normal(size=len(kinds))
    states = [np.array([[kind, value]]) for kind, value in zip(kinds, x, strict=True)]
    reward = np.where(kinds == 0, x, -x)
    judge = critic(situation=lambda states: states[:, 0].astype(int))
    values, _ = judge.judge(reward, np.zeros(len(kinds)), states, states)
    got = np.concatenate(values)
    for kind, sign in ((0, 1), (1, -1)):
        assert np.corrcoef(got[kinds == kind], sign * x[kinds == kind])[0, 1] > 0.999
    np.testing.assert_array_equal(got[kinds == 2], 0)
