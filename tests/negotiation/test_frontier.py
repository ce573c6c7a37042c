"""bupo.negotiation.frontier against brute force over all pairs of outcomes and a scenario worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import HAND

from bupo.negotiation.frontier import analyse, nash_ratio, pareto_distance, pareto_mask
from bupo.negotiation.scenario import ScenarioConfig, procurement


def dominated(pairs, index):
    """Whether some other pair is at least as good for both and better for one: O(N)."""
    first, second = pairs[index]
    return any(a >= first and b >= second and (a > first or b > second) for a, b in pairs)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40))
def test_pareto_mask_equals_pairwise_comparison_with_ties_and_duplicates(pairs):
    expected = [not dominated(pairs, index) for index in range(len(pairs))]
    assert pareto_mask(np.array(pairs, dtype=float).T).tolist() == expected


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60))
def test_pareto_mask_equals_pairwise_comparison_of_real_numbers(pairs):
    expected = [not dominated(pairs, index) for index in range(len(pairs))]
    assert pareto_mask(np.array(pairs).T).tolist() == expected


def test_hand_scenario():
    analysis = analyse(HAND)
    assert np.allclose(analysis.frontier, [[0, 1], [0.3, 0.75], [0.6, 0.5], [0.7, 0.25], [1, 0]])
    assert analysis.nash_point == pytest.approx((0.6, 0.5))
    assert analysis.nash_product == pytest.approx(0.04)
    assert analysis.ceiling == pytest.approx((0.6, 0.5))


def test_analysis_equals_brute_force_on_generated_scenarios():
    for seed in range(40):
        scenario = procurement(ScenarioConfig(), seed)
        analysis = analyse(scenario)
        pairs = [tuple(p.score(tuple(o)) for p in scenario.profiles) for o in scenario.outcomes]
        low, high = (p.limit for p in scenario.profiles)
        frontier = sorted({pair for index, pair in enumerate(pairs) if not dominated(pairs, index)})
        assert np.allclose(analysis.frontier * 100, frontier)
        rational = [(b, s) for b, s in pairs if b >= low and s >= high]
        assert analysis.nash_product * 10_000 == pytest.approx(max((b - low) * (s - high) for b, s in rational))
        b, s = (100 * u for u in analysis.nash_point)
        assert (b - low) * (s - high) == pytest.approx(analysis.nash_product * 10_000)
        assert analysis.ceiling == pytest.approx((max(b for b, _ in rational) / 100, max(s for _, s in rational) / 100))


def test_the_nash_point_lies_on_the_frontier():
    for seed in range(40):
        analysis = analyse(procurement(ScenarioConfig(), seed))
        assert pareto_distance(analysis, analysis.nash_point) == pytest.approx(0, abs=1e-12)


def test_without_a_rational_outcome_all_points_are_the_reservation_values():
    scenario = procurement(ScenarioConfig(), 5, zopa=False)
    reservation = tuple(p.limit / 100 for p in scenario.profiles)
    analysis = analyse(scenario)
    assert analysis.nash_product == 0
    assert analysis.nash_point == analysis.ceiling == pytest.approx(reservation)
    with pytest.raises(ValueError, match="nozopa"):
        nash_ratio(scenario, analysis, reservation)


def test_pareto_distance_by_hand():
    analysis = analyse(HAND)
    assert pareto_distance(analysis, (0.6, 0.5)) == pytest.approx(0)
    assert pareto_distance(analysis, (0.4, 0.5)) == pytest.approx(0.2)  # (2,1), nearest (.6, .5)
    assert pareto_distance(analysis, (0.6 - 0.03, 0.5 - 0.04)) == pytest.approx(0.05)


def test_nash_ratio_by_hand():
    analysis = analyse(HAND)
    assert nash_ratio(HAND, analysis, (0.6, 0.5)) == pytest.approx(1)
    assert nash_ratio(HAND, analysis, (0.5, 0.4)) == pytest.approx(0.25)
    assert nash_ratio(HAND, analysis, (0.3, 0.75)) == 0  # the buyer is below .4
    assert nash_ratio(HAND, analysis, (0.1, 0.1)) == 0  # two losses do not multiply to a gain


def test_a_zopa_of_one_sided_gain_has_rational_outcomes_but_no_nash_ratio():
    # (1,1) is worth 70/25: at limits 70 and 20 the buyer gains nothing, and no other outcome suits both.
    buyer, supplier = HAND.profiles
    edge = replace(HAND, profiles=(replace(buyer, limit=70), replace(supplier, limit=20)))
    analysis = analyse(edge)
    assert analysis.ceiling == pytest.approx((0.7, 0.25))
    with pytest.raises(ValueError, match="no mutually profitable outcome"):
        nash_ratio(edge, analysis, (0.7, 0.25))
