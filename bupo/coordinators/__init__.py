"""The game coordinators: one small file a family, and the dict that names them."""

from __future__ import annotations

from dataclasses import dataclass

from bupo.config import one_of, raise_problems
from bupo.coordinators.base import GameCoordinator
from bupo.coordinators.linear import LinearPool

COORDINATORS: dict[str, type[GameCoordinator]] = {"linear": LinearPool}


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How the sub-policies' proposals become one distribution.

    Attributes:
        name: The family; `linear` is the weighted mean of the proposals.
        weights: Fixed weights, one a sub-policy, any positive scale; empty for uniform.
    """

    name: str = "linear"
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks name and weights."""
        bad = [w for w in self.weights if not w >= 0] or (self.weights and not sum(self.weights) > 0)
        raise_problems(
            [
                one_of("name", self.name, COORDINATORS),
                f"weights: {self.weights} are not weights; give numbers >= 0 with a positive sum" if bad else None,
            ]
        )


def build_coordinator(config: CoordinatorConfig, policies: int) -> GameCoordinator:
    """Makes the coordinator for `policies` sub-policies."""
    return COORDINATORS[config.name](policies, config.weights)
