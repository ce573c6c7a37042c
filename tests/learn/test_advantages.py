"""bupo.learn.advantages by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bupo.learn.advantages import group_advantages, most_informative, role_advantages, scaled_turns


def test_group_advantage_is_reward_less_group_mean():
    reward = np.array([1.0, 3.0, 10.0, 20.0, 30.0])
    got = group_advantages(reward, np.array(["a", "a", "b", "b", "b"]), scale="none")
    np.testing.assert_allclose(got, [-1, 1, -10, 0, 10])


def test_groups_may_be_interleaved():
    got = group_advantages(np.array([1.0, 10.0, 3.0, 30.0]), np.array([7, 2, 7, 2]), scale="none")
    np.testing.assert_allclose(got, [-1, -10, 1, 10])


def test_scaling_divides_by_one_deviation_of_the_whole_batch():
    got = group_advantages(np.array([1.0, 3.0, 10.0, 30.0]), np.array([0, 0, 1, 1]), scale="batch")
    deviation = np.sqrt((1 + 1 + 100 + 100) / 4)
    np.testing.assert_allclose(got, np.array([-1, 1, -10, 10]) / deviation)


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_equal_rewards_in_every_group_give_zeros(scale):
    got = group_advantages(np.array([0.3, 0.3, 0.7, 0.7]), np.array([0, 0, 1, 1]), scale=scale)
    np.testing.assert_array_equal(got, np.zeros(4))


def test_group_of_one_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'lonely' has one row; .*group_size >= 2"):
        group_advantages(np.array([1.0, 2.0, 3.0]), np.array(["a", "a", "lonely"]), scale="none")


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.floats(-5, 5))
def test_group_advantages_sum_to_zero_and_ignore_a_constant(rewards, shift):
    reward, group = np.array(rewards), np.zeros(len(rewards))
    got = group_advantages(reward, group, scale="none")
    assert abs(got.sum()) < 1e-9
    np.testing.assert_allclose(got, group_advantages(reward + shift, group, scale="none"), atol=1e-9)


def test_role_baseline_is_read_before_it_is_updated():
    baselines = {"buyer": 0.5}
    got = role_advantages(np.array([1.0, 0.0]), np.array(["buyer", "buyer"]), baselines, scale="none", decay=0.9)
    np.testing.assert_allclose(got, [0.5, -0.5])  # against 0.5, the old baseline
    first = role_advantages(np.array([1.0, 0.6]), np.array(["buyer"] * 2), baselines, scale="none", decay=0.9)
    np.testing.assert_allclose(first, [0.5, 0.1])
    assert baselines["buyer"] == pytest.approx(0.9 * 0.5 + 0.1 * 0.8)


def test_first_batch_of_a_role_uses_its_own_mean():
    baselines = {}
    got = role_advantages(np.array([0.2, 0.6]), np.array(["supplier"] * 2), baselines, scale="none")
    np.testing.assert_allclose(got, [-0.2, 0.2])
    assert baselines == {"supplier": pytest.approx(0.4)}


def test_roles_do_not_touch_one_another():
    baselines = {"buyer": 0.0, "supplier": 1.0, "absent": 0.25}
    got = role_advantages(np.array([1.0, 1.0]), np.array(["buyer", "supplier"]), baselines, scale="none", decay=0.5)
    np.testing.assert_allclose(got, [1.0, 0.0])
    assert baselines == {"buyer": 0.5, "supplier": 1.0, "absent": 0.25}


def test_scale_by_group_gives_every_group_unit_deviation():
    got = group_advantages(np.array([0.0, 2.0, 10.0, 10.2, 5.0, 5.0]), np.array([0, 0, 1, 1, 2, 2]), scale="group")
    np.testing.assert_allclose(got, [-1, 1, -1, 1, 0, 0], atol=1e-12)


def test_the_most_extreme_rows_of_each_group_are_kept():
    advantage = np.array([0.1, -2.0, 1.5, -0.1, 0.0, 0.0, 3.0, -3.0])
    group = np.array(["a"] * 4 + ["b"] * 4)
    assert most_informative(advantage, group, 0.5).tolist() == [1, 2, 6, 7]
    assert most_informative(advantage, group, 1.0).tolist() == [0, 1, 2, 3, 6, 7]  # advantage 0 teaches nothing
    assert most_informative(np.zeros(4), np.array([0, 0, 1, 1]), 0.5).tolist() == [0, 1, 2, 3]


def test_turn_advantages_are_scaled_by_their_root_mean_square():
    turns, index = [np.array([3.0, -4.0]), np.array([0.0]), np.array([1.0])], np.array([0, 0, 1])
    by_batch = scaled_turns(turns, index, scale="batch")
    np.testing.assert_allclose(np.concatenate(by_batch), np.array([3, -4, 0, 1]) / np.sqrt(26 / 4))
    by_group = scaled_turns(turns, index, scale="group")
    np.testing.assert_allclose(np.concatenate(by_group), [*(np.array([3, -4, 0]) / np.sqrt(25 / 3)), 1])
    for same, original in zip(scaled_turns(turns, index, scale="none"), turns, strict=True):
        np.testing.assert_array_equal(same, original)


def test_a_group_without_differences_gets_zeros():
    got = scaled_turns([np.zeros(2), np.ones(1)], np.array([0, 1]), scale="group")
    np.testing.assert_allclose(np.concatenate(got), [0, 0, 1])
