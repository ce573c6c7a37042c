"""Negotiation scenarios: issues, linear additive utilities, reservation values, and the procurement generator.

Terms follow the automated-negotiation field: an *outcome* gives each issue a value, a *profile* is one side's
private utility function with its reservation value, the *ZOPA* is the set of outcomes that both sides prefer to
no deal, *opposition* is how far the best joint outcome stays from both ideals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from bupo.config import at_least, in_range, raise_problems
from bupo.records import Outcome

BUYER, SUPPLIER = 0, 1
ROLES = ("buyer", "supplier")


@dataclass(frozen=True, kw_only=True)
class Issue:
    """One thing to agree on.

    Attributes:
        name: The key used in offers (`price`).
        label: How prompts call it.
        unit: Unit of the values.
        values: The ordered values that may be agreed.
    """

    name: str
    label: str
    unit: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One side's private preferences: u(o) = sum_i points[i][o_i] / 100 (linear additive).

    Attributes:
        points: Utility points of each value of each issue; the best value's points of all issues add up to 100.
        limit: The reservation value in points: what the side has without a deal.
        company: Who the side speaks for.
    """

    points: tuple[tuple[int, ...], ...]
    limit: int
    company: str

    def score(self, outcome: Outcome) -> int:
        """Utility points of an outcome, 0 to 100."""
        return sum(table[index] for table, index in zip(self.points, outcome, strict=True))

    def surplus(self, outcome: Outcome) -> float:
        """Surplus share: 0 at the reservation value, 1 at the ideal, negative below the reservation."""
        return (self.score(outcome) - self.limit) / (100 - self.limit)

    @property
    def reservation(self) -> float:
        """The reservation value on the utility scale [0, 1]."""
        return self.limit / 100


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One negotiation problem.

    Attributes:
        name: Unique name.
        issues: The agenda.
        profiles: Private preferences of the buyer (seat 0) and the supplier (seat 1).
        rounds: The deadline; a round is one message of each side.
        opener: The seat that speaks first.
    """

    name: str
    issues: tuple[Issue, ...]
    profiles: tuple[Profile, Profile]
    rounds: int
    opener: int

    @cached_property
    def outcomes(self) -> np.ndarray:
        """All outcomes as value indices, int [N, issues], in lexicographic order."""
        axes = [np.arange(len(issue.values)) for issue in self.issues]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))

    @cached_property
    def utilities(self) -> np.ndarray:
        """Utilities of all outcomes for both seats on the 0-1 scale, [2, N]."""
        columns = self.outcomes.T
        return np.stack(
            [
                sum(np.asarray(table)[column] for table, column in zip(profile.points, columns, strict=True)) / 100
                for profile in self.profiles
            ]
        )

    def has_zopa(self) -> bool:
        """Whether some outcome is strictly better than no deal for one side and no worse for the other."""
        gain = self.utilities - np.array([[p.reservation] for p in self.profiles])
        return bool(((gain >= 0).all(0) & (gain > 0).any(0)).any())


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    """The family of procurement scenarios to draw from.

    Attributes:
        min_rounds: Shortest deadline in rounds (one message of each side a round).
        max_rounds: Longest deadline in rounds.
        min_limit: Lowest reservation value in points of 100.
        max_limit: Highest reservation value in points of 100.
        min_zopa: Least joint surplus in the ZOPA, in points above both limits at the best egalitarian outcome.
    """

    min_rounds: int = 4
    max_rounds: int = 6
    min_limit: int = 20
    max_limit: int = 45
    min_zopa: int = 8

    def __post_init__(self) -> None:
        """Checks the ranges."""
        raise_problems(
            [
                at_least("min_rounds", self.min_rounds, 2),
                at_least("max_rounds", self.max_rounds, self.min_rounds),
                in_range("min_limit", self.min_limit, 0, 90),
                in_range("max_limit", self.max_limit, self.min_limit, 90),
                in_range("min_zopa", self.min_zopa, 1, 40),
            ]
        )


PAYMENT = Issue(name="payment", label="payment terms", unit="days", values=(15, 30, 45, 60, 75))
MOQ = Issue(name="moq", label="minimum order", unit="thousand units", values=(10, 20, 30, 40, 50))
PRICE = Issue(name="price", label="annual price", unit="thousand USD", values=tuple(range(800, 961, 20)))

BUYERS = ("Hartwell Tools", "Nordic Pumps", "Brenner Motors", "Calder Lighting", "Ostrava Fittings", "Kestrel Bikes")
SUPPLIERS = ("Meridian Alloys", "Tarn Polymers", "Vesta Steel", "Lowell Resins", "Corvus Metals", "Pike Castings")


def _points(rng: np.random.Generator) -> tuple[int, int, int]:
    """Whole points per step of (price, payment, moq) whose best values add up to 100: 8a + 4b + 4c = 100."""
    price = int(rng.integers(3, 9))
    rest = 25 - 2 * price
    payment = int(rng.integers(3, rest - 2))
    return price, payment, rest - payment


def _profile(rng: np.random.Generator, role: int, limit: int) -> Profile:
    price, payment, moq = _points(rng)
    rising = (
        tuple(price * i for i in range(len(PRICE.values))),
        tuple(payment * i for i in range(len(PAYMENT.values))),
        tuple(moq * i for i in range(len(MOQ.values))),
    )
    # The supplier gains from a high price, early payment and large orders, the buyer from the opposite.
    gains_upward = (False, True, False) if role == BUYER else (True, False, True)
    points = tuple(table if up else table[::-1] for table, up in zip(rising, gains_upward, strict=True))
    names = BUYERS if role == BUYER else SUPPLIERS
    return Profile(points=points, limit=limit, company=names[rng.integers(len(names))])


def procurement(config: ScenarioConfig, seed: int, *, zopa: bool = True) -> Scenario:
    """Draws one B2B procurement scenario: annual price, payment terms, minimum order quantity.

    A manufacturer that needs about 1,000,000 units a year talks to a supplier with about 15% of its market.

    Args:
        config: The family to draw from.
        seed: Seeds everything; equal seeds give equal scenarios.
        zopa: Whether a zone of possible agreement must exist; False draws scenarios in which walking away is right.

    Returns:
        The scenario.
    """
    rng = np.random.default_rng([seed, 0xB0])
    rounds = int(rng.integers(config.min_rounds, config.max_rounds + 1))
    opener = int(rng.integers(2))
    low, high = (config.min_limit, config.max_limit) if zopa else (55, 80)
    while True:
        limits = rng.integers(low, high + 1, size=2)
        scenario = Scenario(
            name=f"procurement-{'' if zopa else 'nozopa-'}{seed}",
            issues=(PRICE, PAYMENT, MOQ),
            profiles=(_profile(rng, BUYER, int(limits[0])), _profile(rng, SUPPLIER, int(limits[1]))),
            rounds=rounds,
            opener=opener,
        )
        if not zopa and not scenario.has_zopa():
            return scenario
        margin = (scenario.utilities * 100 - limits[:, None]).min(0).max()
        if zopa and margin >= config.min_zopa:
            return scenario


def fingerprint(scenarios: Sequence[Scenario]) -> str:
    """A hash that freezes a scenario set: any change of any number in it changes the hash."""
    text = json.dumps([asdict(scenario) for scenario in scenarios], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
