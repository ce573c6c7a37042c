"""bupo.balancer: the rules of a plan, and what applying one does to the pool."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bupo.balancer import BalancerConfig, apply_balance, plan_balance
from bupo.records import BalancePlan, Credit, Scorecard

RULES = BalancerConfig(patience=3, min_age=5, margin=0.02, homogenised=0.5)
NAMES = ("p00", "p01", "p02")
OLD = dict.fromkeys(NAMES, 0)


def card(means=(0.1, 0.0, 0.0), *, half=0.01, kl=None, null=0.1, names=NAMES):
    """A scorecard with given credits (None: undefined), pairwise KL (1 nat where not said) and null KL."""
    count = len(names)
    pairwise = [[0.0 if i == j else 1.0 for j in range(count)] for i in range(count)]
    for (i, j), value in (kl or {}).items():
        pairwise[i][j] = pairwise[j][i] = value
    credits = {
        name: None if mean is None else Credit(mean=mean, low=mean - half, high=mean + half)
        for name, mean in zip(names, means, strict=True)
    }
    return Scorecard(
        names=names,
        pairwise_kl=tuple(map(tuple, pairwise)),
        null_kl=dict.fromkeys(names, null),
        jsd=0.1,
        jsd_weighted=0.1,
        entropy=dict.fromkeys(names, 1.0),
        mixture_entropy=1.1,
        responsibility=dict.fromkeys(names, 1 / count),
        weight=dict.fromkeys(names, 1 / count),
        relative_advantage=credits,
    )


GOOD, BAD, WORSE = card(), card((0.1, -0.2, 0.0)), card((0.1, -0.2, -0.4))
COPIES = card((0.1, 0.03, 0.01), kl={(1, 2): 0.02})  # 0.02 nats between them, 0.1 to their own past: 0.2 of it


def test_bad_policy_goes_only_after_it_was_bad_for_patience_evaluations():
    for cards in ([BAD], [BAD, BAD], [GOOD, BAD, BAD], [BAD, GOOD, BAD], [BAD, BAD, BAD, GOOD]):
        assert plan_balance(cards, OLD, 100, RULES).cull is None
    plan = plan_balance([GOOD, BAD, BAD, BAD], OLD, 100, RULES)
    assert (plan.cull, plan.parent) == ("p01", "p00")
    assert "p01" in plan.reason
    assert "3 evaluations" in plan.reason


def test_bad_means_that_the_upper_bound_lies_below_minus_the_margin():
    def at(upper):
        return [card((0.1, upper - 0.3, 0.0), half=0.3)] * 3

    assert plan_balance(at(-0.019), OLD, 100, RULES).cull is None
    assert plan_balance(at(-0.021), OLD, 100, RULES).cull == "p01"


def test_worst_of_several_bad_ones_goes_and_only_one():
    plan = plan_balance([WORSE] * 3, OLD, 100, RULES)
    assert plan.cull == "p02"
    assert plan.parent == "p00"


def test_young_policies_are_left_in_peace():
    born = {"p00": 0, "p01": 96, "p02": 0}
    assert plan_balance([BAD] * 3, born, 100, RULES).cull is None
    assert plan_balance([BAD] * 3, born, 101, RULES).cull == "p01"


def test_policy_that_was_not_there_in_all_recent_evaluations_stays():
    before = card((0.1, -0.2, 0.0), names=("p00", "p03", "p02"))
    assert plan_balance([before, BAD, BAD], OLD, 100, RULES).cull is None
    copies = card((0.1, 0.03, 0.01), kl={(1, 2): 0.02}, names=("p00", "p03", "p02"))
    assert plan_balance([copies, COPIES, COPIES], OLD, 100, RULES).cull is None


def test_weaker_one_of_a_homogenised_pair_goes_and_the_best_is_copied():
    plan = plan_balance([COPIES] * 3, OLD, 100, RULES)
    assert (plan.cull, plan.parent) == ("p02", "p00")
    assert plan.numbers["similarity"] == pytest.approx(0.2)
    assert plan_balance([COPIES, COPIES, GOOD], OLD, 100, RULES).cull is None


def test_copy_of_the_best_goes_and_not_the_best():
    pair = card((0.1, 0.03, 0.01), kl={(0, 1): 0.02})
    assert plan_balance([pair] * 3, OLD, 100, RULES).cull == "p01"


def test_copies_are_measured_by_what_a_policy_differs_from_its_own_past():
    near, far = card(kl={(1, 2): 0.049}), card(kl={(1, 2): 0.051})
    assert plan_balance([near] * 3, OLD, 100, RULES).cull is not None
    assert plan_balance([far] * 3, OLD, 100, RULES).cull is None


def test_without_a_null_nothing_counts_as_a_copy():
    unknown = card(kl={(1, 2): 1e-6}, null=None)
    assert plan_balance([unknown] * 3, OLD, 100, RULES).cull is None


def test_being_bad_comes_before_being_a_copy():
    both = card((0.1, -0.3, 0.0), kl={(0, 2): 0.001})
    assert plan_balance([both] * 3, OLD, 100, RULES).cull == "p01"


def test_undefined_credit_is_no_reason_to_go():
    assert plan_balance([card((None, None, None))] * 3, OLD, 100, RULES).cull is None


def test_single_policy_is_never_culled():
    alone = card((-5.0,), names=("p00",))
    plan = plan_balance([alone] * 3, {"p00": 0}, 100, RULES)
    assert plan.cull is None
    assert "single" in plan.reason


def test_balancer_named_none_never_does_anything():
    plan = plan_balance([WORSE] * 3, OLD, 100, BalancerConfig(name="none"))
    assert plan.cull is None
    assert plan.reason == "the balancer is off"


def history(seed):
    """Random scorecards of one pool, ages, patience and least age. Numbers by NumPy: hypothesis draws the seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    names = tuple(f"p{k:02d}" for k in range(count))
    cards = [
        card(
            [None if rng.random() < 0.1 else float(rng.choice([-1, 1]) * rng.random()) for _ in names],
            half=float(rng.uniform(0, 0.2)),
            kl={(i, j): float(rng.uniform(0, 0.2)) for i in range(count) for j in range(i)},
            null=None if rng.random() < 0.2 else float(rng.uniform(0, 0.5)),
            names=names,
        )
        for _ in range(rng.integers(1, 5))
    ]
    born = {name: int(rng.integers(21)) for name in names}
    return cards, born, int(rng.integers(1, 4)), int(rng.integers(11))


@given(st.integers(0, 2**32))
@settings(max_examples=1000, deadline=None)
def test_best_is_never_culled_and_the_culled_is_old_enough_in_any_history(seed):
    cards, born, patience, min_age = history(seed)
    plan = plan_balance(
        cards, born, 20, BalancerConfig(patience=patience, min_age=min_age, margin=0.0, homogenised=2.0)
    )
    assert plan.reason
    if plan.cull is None:
        return
    recent = cards[-patience:]
    merit = {
        name: sum(c.relative_advantage[name].mean if c.relative_advantage[name] else 0.0 for c in recent)
        for name in born
    }
    assert len(cards) >= patience
    assert len(born) > 1
    assert plan.cull != plan.parent
    assert merit[plan.parent] == max(merit.values())
    assert 20 - born[plan.cull] >= min_age


def test_applied_plan_swaps_the_culled_for_a_perturbed_copy_of_the_parent():
    pool = tiny.pool(perturbation=0.05)
    kept = {name: [p.detach().clone() for p in pool.parameters(name)] for name in ("p00", "p02")}
    plan = BalancePlan(cull="p01", parent="p00", reason="test")
    done = apply_balance(plan, pool, generator=torch.Generator().manual_seed(0), iteration=12)
    assert done == ("p01", "p03")
    assert pool.names == ("p00", "p02", "p03")
    assert (pool.parents["p03"], pool.born["p03"]) == ("p00", 12)
    for name, tensors in kept.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, pool.parameters(name), strict=True))
    distance = sum((a - b).pow(2).sum() for a, b in zip(kept["p00"], pool.parameters("p03"), strict=True))
    other = sum((a - b).pow(2).sum() for a, b in zip(kept["p02"], pool.parameters("p03"), strict=True))
    assert 0 < distance < other


def test_empty_plan_leaves_the_pool_alone():
    pool = tiny.pool()
    assert apply_balance(BalancePlan(), pool, generator=torch.Generator(), iteration=1) == (None, None)
    assert pool.names == NAMES


@pytest.mark.parametrize(
    "wrong", [{"name": "cull"}, {"patience": 0}, {"min_age": -1}, {"margin": -0.1}, {"homogenised": -1.0}]
)
def test_impossible_settings_are_refused_by_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BalancerConfig(**wrong)
