"""The balancer: Scorecards in, a BalancePlan out, then applied. The decision is a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bupo.config import at_least, one_of, raise_problems
from bupo.policies.pool import PolicyPool
from bupo.records import BalancePlan, Scorecard

BALANCERS = ("replace", "none")


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """When a sub-policy is culled and replaced.

    Attributes:
        name: `replace` culls and injects, `none` leaves the pool alone.
        patience: Evaluations in a row that must say the same before anything is done.
        min_age: Iterations that a new sub-policy is left in peace.
        margin: A policy is bad while the upper bound of its relative advantage is below minus this.
        homogenised: Two policies are copies while their symmetrised KL is below this share of their own null KL.
    """

    name: str = "replace"
    patience: int = 3
    min_age: int = 5
    margin: float = 0.02
    homogenised: float = 0.5

    def __post_init__(self) -> None:
        """Checks the values."""
        raise_problems(
            [
                one_of("name", self.name, BALANCERS),
                at_least("patience", self.patience, 1),
                at_least("min_age", self.min_age, 0),
                at_least("margin", self.margin, 0),
                at_least("homogenised", self.homogenised, 0),
            ]
        )


def _merit(card: Scorecard, name: str) -> float:
    credit = card.relative_advantage.get(name)
    return credit.mean if credit is not None else 0.0


def _upper(card: Scorecard, name: str) -> float:
    credit = card.relative_advantage[name]
    return credit.high if credit is not None else float("inf")


def _similarity(card: Scorecard, i: int, j: int) -> float:
    """Symmetrised KL of a pair over its mean null KL; below 1 two policies differ less than one from its own past."""
    null = [card.null_kl.get(card.names[k]) or 0.0 for k in (i, j)]
    floor = max(sum(null) / 2, 1e-12)
    return 0.5 * (card.pairwise_kl[i][j] + card.pairwise_kl[j][i]) / floor


def plan_balance(
    cards: Sequence[Scorecard], born: Mapping[str, int], iteration: int, config: BalancerConfig
) -> BalancePlan:
    """Decides whether one sub-policy goes and whose perturbed copy takes its place.

    Rules, in order: (1) the worst policy whose relative advantage was bad in each of the last `patience` evaluations;
    (2) the weaker one of the closest pair that was homogenised in each of them. Never the best policy, none younger
    than `min_age`, at most one a time.

    Args:
        cards: Scorecards, newest last.
        born: Iteration of birth of each policy.
        iteration: Now.
        config: Thresholds.

    Returns:
        The plan; empty with a reason where nothing is to be done.
    """
    if config.name == "none":
        return BalancePlan(reason="the balancer is off")
    if len(cards) < config.patience:
        return BalancePlan(reason=f"{len(cards)} of {config.patience} evaluations so far")
    recent = cards[-config.patience :]
    names = recent[-1].names
    if len(names) < 2:
        return BalancePlan(reason="a single sub-policy is never culled")
    best = max(names, key=lambda name: sum(_merit(card, name) for card in recent))
    old_enough = {
        name
        for name in names
        if name != best and iteration - born[name] >= config.min_age and all(name in card.names for card in recent)
    }
    bad = [name for name in old_enough if all(_upper(card, name) < -config.margin for card in recent)]
    if bad:
        worst = min(sorted(bad), key=lambda name: _merit(recent[-1], name))
        upper = [_upper(card, worst) for card in recent]
        return BalancePlan(
            cull=worst,
            parent=best,
            reason=(
                f"{worst}: upper bound of the relative advantage was below -{config.margin} in {config.patience} "
                f"evaluations ({', '.join(f'{value:+.3f}' for value in upper)})"
            ),
            numbers={"relative_advantage": _merit(recent[-1], worst), "best": _merit(recent[-1], best)},
        )
    closest: tuple[float, str, str] | None = None
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            second = names[j]
            if not all(first in card.names and second in card.names for card in recent):
                continue
            ratios = [_similarity(card, card.names.index(first), card.names.index(second)) for card in recent]
            if max(ratios) < config.homogenised and (closest is None or ratios[-1] < closest[0]):
                closest = (ratios[-1], first, second)
    if closest is not None:
        ratio, first, second = closest
        weaker = min((first, second), key=lambda name: (name == best, _merit(recent[-1], name)))
        if weaker in old_enough:
            return BalancePlan(
                cull=weaker,
                parent=best,
                reason=(
                    f"{first} and {second} are copies: their KL is {ratio:.2f} of what one differs from its own past "
                    f"(threshold {config.homogenised}); {weaker} is the weaker"
                ),
                numbers={"similarity": ratio, "relative_advantage": _merit(recent[-1], weaker)},
            )
    return BalancePlan()


def apply_balance(
    plan: BalancePlan, pool: PolicyPool, *, generator: torch.Generator, iteration: int
) -> tuple[str | None, str | None]:
    """Carries a plan out.

    Returns:
        The culled and the injected name, or two None.
    """
    if plan.cull is None or plan.parent is None:
        return None, None
    injected = pool.add_perturbed(plan.parent, generator=generator, iteration=iteration)
    pool.remove(plan.cull)
    return plan.cull, injected
