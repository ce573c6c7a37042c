"""bupo.negotiation.scenario against loops over every outcome and numbers worked out by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bupo.config import ConfigError
from bupo.negotiation.scenario import (
    BUYER,
    SUPPLIER,
    Issue,
    Profile,
    Scenario,
    ScenarioConfig,
    fingerprint,
    procurement,
)

CONFIG = ScenarioConfig()
SEEDS = range(120)


def points_of(profile, outcome):
    """Additive utility, written out."""
    total = 0
    for issue, index in enumerate(outcome):
        total += profile.points[issue][index]
    return total


def every_pair(scenario):
    """(buyer points, supplier points) of every outcome."""
    axes = [range(len(issue.values)) for issue in scenario.issues]
    return [tuple(points_of(p, o) for p in scenario.profiles) for o in itertools.product(*axes)]


def one_issue(buyer, supplier, limits):
    """A scenario with one issue whose values are worth just these points."""
    profiles = tuple(
        Profile(points=(tuple(points),), limit=limit, company="X")
        for points, limit in zip((buyer, supplier), limits, strict=True)
    )
    issue = Issue(name="price", label="price", unit="USD", values=tuple(range(len(buyer))))
    return Scenario(name="one", issues=(issue,), profiles=profiles, rounds=4, opener=0)


@pytest.mark.parametrize("zopa", [True, False])
def test_each_side_has_100_points_at_its_ideal_and_none_at_its_worst(zopa):
    for seed in SEEDS:
        for profile in procurement(CONFIG, seed, zopa=zopa).profiles:
            assert sum(max(table) for table in profile.points) == 100
            assert sum(min(table) for table in profile.points) == 0


def test_buyer_and_supplier_want_the_opposite_on_every_issue():
    for seed in SEEDS:
        scenario = procurement(CONFIG, seed)
        for issue in range(len(scenario.issues)):
            buyer, supplier = (np.diff(scenario.profiles[seat].points[issue]) for seat in (BUYER, SUPPLIER))
            assert (np.sign(buyer) == -np.sign(supplier)).all()
        price = [profile.points[0] for profile in scenario.profiles]
        assert price[BUYER][0] == max(price[BUYER]) and price[SUPPLIER][0] == min(price[SUPPLIER])


def test_utilities_and_outcomes_cover_the_whole_grid_in_lexicographic_order():
    scenario = procurement(CONFIG, 3)
    assert len(scenario.outcomes) == 9 * 5 * 5
    assert [tuple(o) for o in scenario.outcomes] == list(itertools.product(range(9), range(5), range(5)))
    assert np.allclose(scenario.utilities.T * 100, every_pair(scenario))


def test_score_and_surplus_by_hand():
    profile = Profile(points=((60, 30, 0), (0, 40)), limit=40, company="X")
    assert [profile.score(o) for o in ((0, 1), (1, 0), (2, 0))] == [100, 30, 0]
    assert profile.surplus((0, 1)) == 1
    assert profile.surplus((2, 1)) == 0
    assert profile.surplus((1, 0)) == pytest.approx(-1 / 6)
    assert profile.reservation == 0.4


def test_score_refuses_an_outcome_of_another_length():
    with pytest.raises(ValueError):
        Profile(points=((60, 0), (0, 40)), limit=40, company="X").score((0,))


def test_generated_scenarios_always_have_a_zopa_of_the_required_width():
    for config in (CONFIG, ScenarioConfig(min_zopa=20), ScenarioConfig(min_limit=45, max_limit=60, min_zopa=1)):
        for seed in SEEDS:
            scenario = procurement(config, seed)
            limits = [profile.limit for profile in scenario.profiles]
            width = max(min(b - limits[0], s - limits[1]) for b, s in every_pair(scenario))
            assert width >= config.min_zopa
            assert scenario.has_zopa()
            assert all(config.min_limit <= limit <= config.max_limit for limit in limits)
            assert config.min_rounds <= scenario.rounds <= config.max_rounds


def test_scenarios_drawn_without_a_zopa_have_no_deal_that_is_good_for_both():
    for seed in SEEDS:
        scenario = procurement(CONFIG, seed, zopa=False)
        low, high = (profile.limit for profile in scenario.profiles)
        assert not any(b >= low and s >= high and (b, s) != (low, high) for b, s in every_pair(scenario))
        assert not scenario.has_zopa()


def test_zopa_needs_a_strict_gain_of_one_side_and_no_loss_of_the_other():
    assert not one_issue((100, 50, 0), (0, 50, 100), (50, 50)).has_zopa()
    assert one_issue((100, 50, 0), (0, 50, 100), (49, 50)).has_zopa()
    assert not one_issue((100, 50, 0), (0, 50, 100), (51, 50)).has_zopa()


def test_equal_seeds_give_equal_scenarios_and_other_seeds_others():
    assert [procurement(CONFIG, seed) for seed in SEEDS] == [procurement(CONFIG, seed) for seed in SEEDS]
    contents = {fingerprint([replace(procurement(CONFIG, seed), name="same")]) for seed in range(400)}
    assert len(contents) == 400


def test_the_generator_varies_rounds_opener_limits_weights_and_companies():
    drawn = [procurement(CONFIG, seed) for seed in range(300)]
    assert {s.rounds for s in drawn} == {4, 5, 6}
    assert {s.opener for s in drawn} == {0, 1}
    for seat in (BUYER, SUPPLIER):
        profiles = [s.profiles[seat] for s in drawn]
        assert len({p.limit for p in profiles}) > 20
        assert len({p.points for p in profiles}) > 30
        assert len({p.company for p in profiles}) == 6
        for issue in range(3):
            assert len({max(p.points[issue]) for p in profiles}) >= 5


def test_the_sides_weigh_issues_differently_so_that_there_is_something_to_trade():
    """Log-rolling needs unequal weights: equal in at most 1 of 10 scenarios."""
    same = sum(len({tuple(max(t) for t in p.points) for p in procurement(CONFIG, s).profiles}) == 1 for s in SEEDS)
    assert same < len(SEEDS) / 10


def test_fingerprint_changes_with_any_number_and_with_the_order():
    first, second = procurement(CONFIG, 1), procurement(CONFIG, 2)
    buyer, supplier = first.profiles
    points = ((buyer.points[0][0] + 1, *buyer.points[0][1:]), *buyer.points[1:])
    price = replace(first.issues[0], values=(801, *first.issues[0].values[1:]))
    variants = [
        first,
        replace(first, rounds=first.rounds + 1),
        replace(first, opener=1 - first.opener),
        replace(first, profiles=(replace(buyer, limit=buyer.limit + 1), supplier)),
        replace(first, profiles=(buyer, replace(supplier, limit=supplier.limit - 1))),
        replace(first, profiles=(replace(buyer, points=points), supplier)),
        replace(first, issues=(price, *first.issues[1:])),
    ]
    hashes = [fingerprint([v, second]) for v in variants] + [fingerprint([second, first]), fingerprint([first])]
    assert len(set(hashes)) == len(hashes)
    assert fingerprint([procurement(CONFIG, 1), procurement(CONFIG, 2)]) == hashes[0]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_rounds": 1}, "min_rounds"),
        ({"min_rounds": 9}, "max_rounds"),
        ({"min_limit": -1}, "min_limit"),
        ({"max_limit": 10}, "max_limit"),
        ({"min_zopa": 0}, "min_zopa"),
    ],
)
def test_impossible_families_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        ScenarioConfig(**wrong)
