"""Outcome analysis: Pareto frontier, Nash point, distances (two sides, utilities on the 0-1 scale).

Shape legend: N outcomes, F frontier points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bupo.negotiation.scenario import Scenario


def pareto_mask(utilities: np.ndarray) -> np.ndarray:
    """Which outcomes are Pareto-optimal.

    Sorting by the first side and scanning the second side's running maximum costs O(N log N).

    Args:
        utilities: Utilities of both sides, [2, N].

    Returns:
        True where no other outcome is at least as good for both and better for one, bool [N]. Equal pairs are all kept.
    """
    first, second = utilities
    order = np.lexsort((-second, -first))
    sorted_first, sorted_second = first[order], second[order]
    best_before = np.concatenate([[-np.inf], np.maximum.accumulate(sorted_second)[:-1]])
    # Ties in the first side are sorted by the second, so the first of a tie group decides; equal pairs stay.
    same_as_leader = np.zeros(len(order), dtype=bool)
    same_as_leader[1:] = (sorted_first[1:] == sorted_first[:-1]) & (sorted_second[1:] == sorted_second[:-1])
    keep = sorted_second > best_before
    for index in np.flatnonzero(same_as_leader):
        keep[index] = keep[index - 1]
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = keep
    return mask


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What perfect knowledge of both profiles tells about a scenario.

    Attributes:
        frontier: Pareto-optimal utility pairs, ascending in the buyer's utility, [F, 2].
        nash_product: Greatest product of the two surpluses (u - reservation) over rational outcomes; 0 without any.
        nash_point: Utilities at that outcome; the reservation values without a rational outcome.
        ceiling: For each seat, its best utility among outcomes that the other side does not refuse.
    """

    frontier: np.ndarray
    nash_product: float
    nash_point: tuple[float, float]
    ceiling: tuple[float, float]


def analyse(scenario: Scenario) -> Analysis:
    """Computes the analysis of one scenario by looking at every outcome."""
    utilities = scenario.utilities
    reservation = np.array([profile.reservation for profile in scenario.profiles])
    frontier = np.unique(utilities[:, pareto_mask(utilities)].T, axis=0)
    gain = utilities - reservation[:, None]
    rational = (gain >= -1e-9).all(0)
    if not rational.any():
        point = (float(reservation[0]), float(reservation[1]))
        return Analysis(frontier=frontier, nash_product=0.0, nash_point=point, ceiling=point)
    products = np.where(rational, gain[0] * gain[1], -np.inf)
    best = int(products.argmax())
    return Analysis(
        frontier=frontier,
        nash_product=max(float(products[best]), 0.0),
        nash_point=(float(utilities[0, best]), float(utilities[1, best])),
        ceiling=(float(utilities[0, rational].max()), float(utilities[1, rational].max())),
    )


def pareto_distance(analysis: Analysis, pair: tuple[float, float]) -> float:
    """Euclidean distance of a utility pair to the nearest Pareto-optimal outcome (0 on the frontier)."""
    return float(np.sqrt(((analysis.frontier - np.asarray(pair)) ** 2).sum(1)).min())


def nash_ratio(scenario: Scenario, analysis: Analysis, pair: tuple[float, float]) -> float:
    """Product of the surpluses over the greatest possible one, in [0, 1]; 0 if either side is below its reservation.

    Raises:
        ValueError: The scenario has no rational outcome with a positive product, so the ratio is undefined.
    """
    if analysis.nash_product <= 0:
        raise ValueError(f"{scenario.name} has no mutually profitable outcome: its Nash ratio is undefined")
    gain = [u - profile.reservation for u, profile in zip(pair, scenario.profiles, strict=True)]
    return max(gain[0], 0.0) * max(gain[1], 0.0) / analysis.nash_product
