"""bupo.learn.warmstart: the order of SFT examples. Training and the cache: tests/test_train.py."""

import numpy as np
import pytest

from bupo.learn.warmstart import WarmstartConfig, bucketed, nano_folder
from bupo.negotiation.scenario import ScenarioConfig
from bupo.policies.nano import NanoConfig

LENGTHS = np.random.default_rng(0).integers(50, 500, size=1003).tolist()


def batches(order, batch=4):
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def test_each_example_comes_once_and_the_short_batch_last():
    order = bucketed(LENGTHS, 4, seed=1)
    assert sorted(order) == list(range(len(LENGTHS)))
    assert [len(batch) for batch in batches(order)] == [4] * 250 + [3]


def test_batches_hold_similar_lengths_so_that_little_is_padding():
    def padded(order):
        return sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches(order)) / sum(LENGTHS)

    assert padded(bucketed(LENGTHS, 4, seed=1)) < 1.03
    assert padded(np.random.default_rng(1).permutation(len(LENGTHS)).tolist()) > 1.2


def test_lengths_of_successive_batches_have_no_trend():
    means = np.array([np.mean([LENGTHS[i] for i in batch]) for batch in batches(bucketed(LENGTHS, 4, seed=1))])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


def test_the_seed_decides():
    assert bucketed(LENGTHS, 4, seed=1) == bucketed(LENGTHS, 4, seed=1) != bucketed(LENGTHS, 4, seed=2)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_few_examples(count):
    assert sorted(bucketed(LENGTHS[:count], 4, seed=0)) == list(range(count))


def test_a_nano_base_is_cached_by_what_shapes_it_and_by_nothing_else():
    def folder(config=None, nano=None, scenarios=None):
        return nano_folder(config or WarmstartConfig(), nano or NanoConfig(), scenarios or ScenarioConfig())

    same = [
        WarmstartConfig(public_dialogues=1),
        WarmstartConfig(public_lr=0.5),
        WarmstartConfig(public_batch=9),
    ]
    assert {folder(config) for config in same} == {folder()}
    others = [
        folder(WarmstartConfig(lr=1e-3)),
        folder(WarmstartConfig(seed=1)),
        folder(nano=NanoConfig(layers=2)),
        folder(scenarios=ScenarioConfig(max_rounds=9)),
    ]
    assert len({folder(), *others}) == 5
