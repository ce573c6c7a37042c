"""Uncertainty for evaluation results: clustered bootstrap, Wilson, McNemar, sign flips and Holm.

Dialogues of one scenario resemble one another, so the scenario (the cluster) is the unit that is resampled, never the
dialogue. Before/after comparisons play the same seeds and are paired element by element.

Shapes: every array argument is one-dimensional, one element a dialogue; NaN marks a dialogue the measure does not
apply to (for example the agreed-only payoff of a dialogue without a deal).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

STATISTICS = ("mean", "cluster_mean")


@dataclass(frozen=True)
class Interval:
    """A point estimate and its confidence interval.

    Attributes:
        mean: The estimate, in the unit of the data; NaN without data.
        low: Lower confidence limit; NaN where the data cannot give one.
        high: Upper confidence limit; NaN where the data cannot give one.
        n: Number of observations used (not clusters).
        level: Confidence level in (0, 1).
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def as_dict(self) -> dict[str, float | list[float | None] | None]:
        """Returns ``{"mean": x, "ci95": [low, high]}`` in plain JSON values; NaN becomes None."""
        return {"mean": _json(self.mean), f"ci{100 * self.level:g}": [_json(self.low), _json(self.high)]}


def clustered_bootstrap(
    values: ArrayLike,
    clusters: ArrayLike,
    *,
    statistic: str = "mean",
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap that resamples whole clusters with replacement.

    Args:
        values: [N] observations; NaN entries are left out.
        clusters: [N] cluster of each observation (integers or strings).
        statistic: ``"mean"`` pools the observations (sum over count, so larger clusters weigh more);
            ``"cluster_mean"`` gives every cluster with data the same weight.
        draws: Number of bootstrap replicates.
        seed: Seed of the resampling.
        level: Confidence level.

    Returns:
        The estimate with percentile limits. Without observations all three are NaN; with observations from one
        cluster only, the limits are NaN, since one cluster says nothing about the spread between clusters.

    Raises:
        ValueError: On arrays of different length or not one-dimensional, an unknown statistic, or a bad level.

    Source: Davison & Hinkley, Bootstrap Methods and their Application (1997), sections 3.8 and 5.3.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"unknown statistic {statistic!r}; choose one of {', '.join(STATISTICS)}")
    _check_level(level)
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    sums_C, counts_C = _cluster_sums(_vector("values", values), clusters)
    n = int(counts_C.sum())
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, level)
    if statistic == "cluster_mean":
        sums_C, counts_C = sums_C / counts_C, np.ones_like(counts_C)
    mean = float(sums_C.sum() / counts_C.sum())
    if len(sums_C) == 1:
        return Interval(mean, math.nan, math.nan, n, level)
    picks_DC = np.random.default_rng(seed).integers(len(sums_C), size=(draws, len(sums_C)))
    replicates_D = sums_C[picks_DC].sum(axis=1) / counts_C[picks_DC].sum(axis=1)
    low, high = np.quantile(replicates_D, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high), n, level)


def paired_difference(
    after: ArrayLike,
    before: ArrayLike,
    clusters: ArrayLike,
    *,
    statistic: str = "mean",
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Clustered bootstrap of ``after - before``, paired element by element.

    A pair counts only where both sides are known (not NaN).

    Args:
        after: [N] observations of the later stage.
        before: [N] observations of the earlier stage; element i was played with the same seed as ``after[i]``.
        clusters: [N] cluster of each pair.
        statistic: As in `clustered_bootstrap`.
        draws: Number of bootstrap replicates.
        seed: Seed of the resampling.
        level: Confidence level.

    Returns:
        The mean difference with its interval.

    Raises:
        ValueError: If the lengths differ, or as in `clustered_bootstrap`.
    """
    difference = _difference(after, before)
    return clustered_bootstrap(difference, clusters, statistic=statistic, draws=draws, seed=seed, level=level)


def sign_flip(after: ArrayLike, before: ArrayLike, clusters: ArrayLike, *, draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided permutation p-value of a mean paired difference, flipping whole clusters.

    Under the null hypothesis after and before are exchangeable within a cluster, so each cluster's summed difference
    may change sign. All 2^C sign patterns are counted when there are no more than ``draws``; otherwise ``draws``
    random ones, with the observed pattern added so that p is never 0.

    Args:
        after: [N] observations of the later stage.
        before: [N] observations of the earlier stage.
        clusters: [N] cluster of each pair.
        draws: Number of random sign patterns.
        seed: Seed of the sign patterns.

    Returns:
        The p-value in (0, 1]; 1 without any known pair.

    Raises:
        ValueError: If the lengths differ or ``draws`` is not positive.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    sums_C, _ = _cluster_sums(_difference(after, before), clusters)
    if len(sums_C) == 0:
        return 1.0
    exact = len(sums_C) <= math.log2(draws)
    if exact:
        bits_DC = np.arange(2 ** len(sums_C))[:, None] >> np.arange(len(sums_C)) & 1
    else:
        bits_DC = np.random.default_rng(seed).integers(2, size=(draws, len(sums_C)))
    flipped_D = np.abs((2 * bits_DC - 1) @ sums_C)
    # The tolerance keeps patterns that tie with the observed one in exact arithmetic.
    extreme = int((flipped_D >= abs(sums_C.sum()) - 1e-9 * np.abs(sums_C).sum()).sum())
    return extreme / len(bits_DC) if exact else (extreme + 1) / (draws + 1)


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval of a proportion of independent trials.

    Args:
        successes: Number of successes.
        n: Number of trials.
        level: Confidence level.

    Returns:
        The observed proportion with its interval; all NaN when ``n`` is 0.

    Raises:
        ValueError: Unless 0 <= successes <= n and 0 < level < 1.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (JASA 1927).
    """
    _check_level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n, got successes={successes}, n={n}")
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, level)
    p = float(successes) / n
    z = float(stats.norm.ppf((1 + level) / 2))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half), int(n), level)


def mcnemar(before: ArrayLike, after: ArrayLike) -> float:
    """Exact two-sided McNemar test of paired yes/no outcomes.

    Only discordant pairs carry evidence: under the null each direction has probability 1/2. The test treats pairs as
    independent; where several pairs share a scenario, `sign_flip` on the same outcomes respects the clusters.

    Args:
        before: [N] outcomes, true or false (or 1 and 0).
        after: [N] outcomes of the same dialogues later.

    Returns:
        The p-value in (0, 1]; 1 without discordant pairs.

    Raises:
        ValueError: If the lengths differ or an outcome is neither 0 nor 1.

    Source: McNemar, Note on the sampling error of the difference between correlated proportions (1947).
    """
    before_N, after_N = _vector("before", before), _vector("after", after)
    _check_lengths("before", before_N, "after", after_N)
    for name, outcome_N in (("before", before_N), ("after", after_N)):
        if not np.isin(outcome_N, (0.0, 1.0)).all():
            raise ValueError(f"{name} must hold only true/false (or 1/0); leave pairs without an outcome out")
    gained = int(((before_N == 0) & (after_N == 1)).sum())
    lost = int(((before_N == 1) & (after_N == 0)).sum())
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment for a family of tests.

    Args:
        p_values: Raw p-value of each test by name.

    Returns:
        Adjusted p-values in the same order; rejecting those at or below alpha bounds the chance of any false
        rejection in the family by alpha.

    Raises:
        ValueError: If a p-value is not in [0, 1].

    Source: Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise ValueError(f"the p-value of {name!r} must be in [0, 1], got {p}")
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        running = max(running, min(1.0, (len(p_values) - rank) * float(p_values[name])))
        adjusted[name] = running
    return {name: adjusted[name] for name in p_values}


def _cluster_sums(values_N: NDArray[np.float64], clusters: ArrayLike) -> tuple[NDArray, NDArray]:
    """Sum and count of the known values of each cluster that has any, both [C]."""
    clusters_N = np.asarray(clusters)
    if clusters_N.ndim != 1:
        raise ValueError(f"clusters must be one-dimensional, got shape {clusters_N.shape}")
    _check_lengths("values", values_N, "clusters", clusters_N)
    known_N = ~np.isnan(values_N)
    # A cluster without data adds nothing to either sum: leaving it out keeps every replicate defined, and to first
    # order does not change the spread of the ratio.
    names_C, index_N = np.unique(clusters_N[known_N], return_inverse=True)
    sums_C = np.bincount(index_N, weights=values_N[known_N], minlength=len(names_C))
    return sums_C, np.bincount(index_N, minlength=len(names_C)).astype(np.float64)


def _difference(after: ArrayLike, before: ArrayLike) -> NDArray[np.float64]:
    after_N, before_N = _vector("after", after), _vector("before", before)
    _check_lengths("after", after_N, "before", before_N)
    return after_N - before_N


def _vector(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


def _check_lengths(name_a: str, a: NDArray, name_b: str, b: NDArray) -> None:
    if len(a) != len(b):
        raise ValueError(
            f"{name_a} and {name_b} must have one element per dialogue in the same order, got {len(a)} and {len(b)}"
        )


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1 (for example 0.95), got {level}")


def _json(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
