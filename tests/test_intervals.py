"""bupo.intervals against hand computation, scipy's own functions, and simulated coverage."""

import itertools
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bupo.intervals import Interval, clustered_bootstrap, holm, mcnemar, paired_difference, sign_flip, wilson


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def clustered_data(rng, clusters, per_cluster, between=1.0, within=1.0):
    centres = rng.normal(0, between, size=clusters)
    values = centres[:, None] + rng.normal(0, within, size=(clusters, per_cluster))
    return values.ravel(), np.repeat(np.arange(clusters), per_cluster)


def test_interval_dict_is_valid_json_with_nan_as_null():
    assert Interval(0.5, 0.25, 0.75, 4).as_dict() == {"mean": 0.5, "ci95": [0.25, 0.75]}
    empty = Interval(math.nan, math.nan, math.nan, 0).as_dict()
    assert json.loads(json.dumps(empty, allow_nan=False)) == {"mean": None, "ci95": [None, None]}
    assert set(Interval(0.5, 0.2, 0.8, 4, level=0.9).as_dict()) == {"mean", "ci90"}
    values = Interval(np.float64(0.5), np.float64(0.2), np.float64(0.8), 3).as_dict()  # type: ignore[arg-type]
    assert type(values["mean"]) is float


def test_mean_pools_unequal_clusters_and_skips_nan():
    values = [1.0, 0.0, 0.0, math.nan, 5.0]
    clusters = ["a", "b", "b", "b", "c"]
    result = clustered_bootstrap(values, clusters)
    assert result.mean == pytest.approx(6 / 4)
    assert result.n == 4
    assert result.low < result.mean < result.high
    by_cluster = clustered_bootstrap(values, clusters, statistic="cluster_mean")
    assert by_cluster.mean == pytest.approx((1 + 0 + 5) / 3)


def test_two_clusters_give_the_enumerable_bootstrap_distribution():
    # Resampling {0, 1} twice gives means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    wide = clustered_bootstrap([0.0, 1.0], [0, 1], level=0.9)
    narrow = clustered_bootstrap([0.0, 1.0], [0, 1], level=0.4)
    assert (wide.low, wide.high) == (0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_singleton_clusters_agree_with_scipys_bootstrap():
    values = np.random.default_rng(3).gamma(2.0, size=80)
    ours = clustered_bootstrap(values, np.arange(80), draws=20_000)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.high, abs=0.02)


def test_width_matches_the_between_cluster_standard_error():
    values, clusters = clustered_data(np.random.default_rng(0), clusters=200, per_cluster=10, between=2.0)
    means = values.reshape(200, 10).mean(axis=1)
    expected = 2 * 1.96 * means.std(ddof=1) / math.sqrt(200)
    result = clustered_bootstrap(values, clusters)
    assert result.high - result.low == pytest.approx(expected, rel=0.08)
    naive = clustered_bootstrap(values, np.arange(len(values)))
    assert result.high - result.low > 2 * (naive.high - naive.low)


def test_coverage_on_clustered_data_is_near_nominal():
    rng = np.random.default_rng(11)
    covered = 0
    for trial in range(300):
        result = clustered_bootstrap(*clustered_data(rng, 40, 6), draws=400, seed=trial)
        covered += result.low <= 0 <= result.high
    # Four standard errors around .95, and a point for the known slight narrowness of percentile limits.
    assert 0.89 <= covered / 300 <= 0.99


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_no_data_gives_nan_without_warnings(values):
    result = clustered_bootstrap(values, ["s"] * len(values))
    assert result.n == 0
    assert all(math.isnan(x) for x in (result.mean, result.low, result.high))


def test_one_cluster_has_a_mean_but_no_interval():
    result = clustered_bootstrap([1.0, 2.0, math.nan], [7, 7, 8])
    assert (result.mean, result.n) == (1.5, 2)
    assert math.isnan(result.low) and math.isnan(result.high)


def test_same_seed_same_interval():
    values, clusters = clustered_data(np.random.default_rng(0), 20, 3)
    assert clustered_bootstrap(values, clusters, seed=4) == clustered_bootstrap(values, clusters, seed=4)
    assert clustered_bootstrap(values, clusters, seed=4) != clustered_bootstrap(values, clusters, seed=5)


def test_row_order_does_not_matter():
    values, clusters = clustered_data(np.random.default_rng(0), 20, 3)
    order = np.random.default_rng(1).permutation(len(values))
    shuffled = clustered_bootstrap(values[order], clusters[order])
    assert shuffled.low == pytest.approx(clustered_bootstrap(values, clusters).low)


def test_pairing_removes_the_noise_both_stages_share():
    rng = np.random.default_rng(5)
    before, clusters = clustered_data(rng, 60, 10, between=3.0)
    after = before + 0.1 + rng.normal(0, 0.2, size=len(before))
    paired = paired_difference(after, before, clusters)
    assert paired.low > 0 and paired.mean == pytest.approx(np.mean(after - before))
    assert paired.high - paired.low < 0.1 * (lambda i: i.high - i.low)(clustered_bootstrap(after, clusters))


def test_a_pair_counts_only_when_both_sides_are_known():
    result = paired_difference([1.0, math.nan, 3.0], [0.0, 0.0, math.nan], [0, 1, 2])
    assert (result.mean, result.n) == (1.0, 1)


def test_bad_arguments_say_what_came():
    with pytest.raises(ValueError, match=r"after and before .* got 2 and 1"):
        paired_difference([1.0, 2.0], [1.0], [0, 1])
    with pytest.raises(ValueError, match="got 2 and 3"):
        clustered_bootstrap([1.0, 2.0], [0, 1, 2])
    with pytest.raises(ValueError, match="one-dimensional"):
        clustered_bootstrap([[1.0]], [0])
    with pytest.raises(ValueError, match=r"'median'.*mean, cluster_mean"):
        clustered_bootstrap([1.0], [0], statistic="median")
    with pytest.raises(ValueError, match="got 95"):
        clustered_bootstrap([1.0], [0], level=95)
    with pytest.raises(ValueError, match="draws"):
        clustered_bootstrap([1.0], [0], draws=0)
    with pytest.raises(ValueError, match="successes=5, n=4"):
        wilson(5, 4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_wilson_equals_scipys(counts, level):
    successes, n = counts
    theirs = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    ours = wilson(successes, n, level)
    assert ours.mean == successes / n
    assert ours.low == pytest.approx(theirs.low, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, abs=1e-9)


def test_wilson_without_trials_is_nan():
    assert math.isnan(wilson(0, 0).mean)


def test_mcnemar_counts_only_discordant_pairs():
    # 1 lost, 5 gained, any number concordant: p = 2 * (C(6,0) + C(6,1)) / 2^6 = 14/64.
    before = [1] + [0] * 5 + [1] * 20 + [0] * 9
    after = [0] + [1] * 5 + [1] * 20 + [0] * 9
    assert mcnemar(before, after) == pytest.approx(14 / 64)
    assert mcnemar(after, before) == pytest.approx(14 / 64)
    assert mcnemar([True, False], [True, False]) == 1.0
    with pytest.raises(ValueError, match="after must hold only true/false"):
        mcnemar([0, 1], [0.0, math.nan])


def test_sign_flip_equals_full_enumeration_over_clusters():
    rng = np.random.default_rng(2)
    after, clusters = clustered_data(rng, 8, 3)
    before = rng.normal(-0.7, 1.0, size=len(after))
    sums = [(after - before)[clusters == c].sum() for c in range(8)]
    observed = abs(sum(sums))
    patterns = list(itertools.product([-1, 1], repeat=8))
    expected = sum(abs(np.dot(p, sums)) >= observed - 1e-9 for p in patterns) / len(patterns)
    assert sign_flip(after, before, clusters) == pytest.approx(expected)
    # 255 patterns at most are drawn at random: an estimate of the same number.
    assert sign_flip(after, before, clusters, draws=255) == pytest.approx(expected, abs=0.1)


def test_sign_flip_of_one_pair_a_cluster_agrees_with_scipys_permutation_test():
    rng = np.random.default_rng(8)
    before = rng.normal(size=60)
    after = before + rng.normal(0.25, 1.0, size=60)
    theirs = stats.permutation_test(
        (after, before),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    assert sign_flip(after, before, np.arange(60)) == pytest.approx(theirs.pvalue, abs=0.02)


def test_sign_flip_holds_its_level_where_an_unclustered_test_does_not():
    rng = np.random.default_rng(4)
    clustered = naive = 0
    for trial in range(200):
        difference, clusters = clustered_data(rng, 20, 10, between=1.0)
        zeros = np.zeros_like(difference)
        clustered += sign_flip(difference, zeros, clusters, draws=400, seed=trial) <= 0.05
        naive += sign_flip(difference, zeros, np.arange(len(zeros)), draws=400, seed=trial) <= 0.05
    assert clustered / 200 <= 0.10
    assert naive / 200 >= 0.25


def test_sign_flip_never_claims_certainty():
    assert sign_flip([], [], []) == 1.0
    assert sign_flip([1.0], [1.0], [0]) == 1.0
    assert 0 < sign_flip(np.ones(50), np.zeros(50), np.arange(50)) < 0.001


def test_holm_by_hand():
    # Sorted: .01*4 = .04, .02*3 = .06, .03*2 = .06, .04*1 = .04 -> raised to the running maximum .06.
    result = holm({"rounds": 0.03, "payoff": 0.01, "agreement": 0.04, "tone": 0.02})
    assert result == pytest.approx({"rounds": 0.06, "payoff": 0.04, "agreement": 0.06, "tone": 0.06})
    assert list(result) == ["rounds", "payoff", "agreement", "tone"]
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    with pytest.raises(ValueError, match="'a' must be in"):
        holm({"a": math.nan})
