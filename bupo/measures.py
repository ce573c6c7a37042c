"""What an evaluation measures of each dialogue, and its summaries.

Definitions of all measures: docs/metrics.md. Payoff is own utility on the 0-1 scale, the reservation value without a
deal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bupo.intervals import clustered_bootstrap
from bupo.negotiation.frontier import Analysis, nash_ratio, pareto_distance
from bupo.negotiation.opponents import EVALUATION_OPPONENTS
from bupo.records import Episode
from bupo.rollout.dialogues import Seating

MEASURES = (
    "payoff",
    "payoff_agreed_only",
    "opponent_payoff",
    "surplus_share",
    "opponent_surplus_share",
    "agreement_rate",
    "rounds",
    "valid_message_rate",
    "irrational_deals",
    "nash_ratio",
    "pareto_distance",
)
PAIRED = ("payoff", "agreement_rate", "rounds", "irrational_deals")


def measure(seating: Seating, episode: Episode, seat: int, analysis: Analysis) -> dict[str, float]:
    """All measures of one dialogue for one seat; NaN where a measure is defined on deals only."""
    scenario, deal = seating.scenario, episode.deal is not None
    own = [turn for turn in episode.turns if turn.seat == seat]
    valid = [turn.action.kind != "invalid" for turn in own]
    nan = float("nan")
    return {
        "payoff": episode.utilities[seat],
        "payoff_agreed_only": episode.utilities[seat] if deal else nan,
        "opponent_payoff": episode.utilities[1 - seat],
        "surplus_share": episode.surplus[seat],
        "opponent_surplus_share": episode.surplus[1 - seat],
        "agreement_rate": float(deal),
        "rounds": episode.rounds,
        "valid_message_rate": float(np.mean(valid)) if valid else nan,
        "irrational_deals": float(deal and episode.surplus[seat] < 0),
        "nash_ratio": nash_ratio(scenario, analysis, episode.utilities) if deal and analysis.nash_product > 0 else nan,
        "pareto_distance": pareto_distance(analysis, episode.utilities) if deal else nan,
    }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measures of many dialogues, ready to be summarised.

    Attributes:
        values: Measure -> one value a dialogue (and seat).
        scenario: Scenario of each, the cluster of the bootstrap.
        opponent: Opponent of each.
    """

    values: Mapping[str, np.ndarray]
    scenario: np.ndarray
    opponent: np.ndarray

    def __len__(self) -> int:
        """Number of dialogues (and seats)."""
        return len(self.scenario)

    def summary(self) -> dict[str, Any]:
        """Mean and interval of each measure."""
        return {
            key: clustered_bootstrap(values, self.scenario, draws=1000).as_dict() for key, values in self.values.items()
        }

    def where(self, opponent: str) -> Measured:
        """The dialogues against one opponent."""
        mask = self.opponent == opponent
        return Measured(
            values={key: values[mask] for key, values in self.values.items()},
            scenario=self.scenario[mask],
            opponent=self.opponent[mask],
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; NaN as null."""
        return {
            "values": {
                key: [None if np.isnan(value) else float(value) for value in values]
                for key, values in self.values.items()
            },
            "scenario": self.scenario.tolist(),
            "opponent": self.opponent.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Measured:
        """Restores what `state_dict` gave."""
        return cls(
            values={key: np.array(values, dtype=float) for key, values in state["values"].items()},
            scenario=np.array(state["scenario"]),
            opponent=np.array(state["opponent"]),
        )


def measure_all(seatings: Sequence[Seating], episodes: Sequence[Episode], analyses: Mapping[str, Analysis]) -> Measured:
    """Measures each seat that `policy` (or a yardstick in its place) held."""
    rows, scenarios, opponents = [], [], []
    for seating, episode in zip(seatings, episodes, strict=True):
        for seat in (0, 1):
            if seating.learner[seat]:
                rows.append(measure(seating, episode, seat, analyses[seating.scenario.name]))
                scenarios.append(seating.scenario.name)
                opponents.append(seating.players[1 - seat])
    return Measured(
        values={key: np.array([row[key] for row in rows]) for key in MEASURES},
        scenario=np.array(scenarios),
        opponent=np.array(opponents),
    )


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One stage: against never-seen opponents, without ZOPA (full only), and in self-play."""

    scripted: Measured
    no_zopa: Measured | None
    self_play: Measured

    def summary(self) -> dict[str, Any]:
        """The stage's entry in summary.json."""
        entry = self.scripted.summary()
        entry["per_opponent"] = {name: self.scripted.where(name).summary() for name in EVALUATION_OPPONENTS}
        if self.no_zopa is not None:
            entry["no_zopa"] = self.no_zopa.summary()
        return entry

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, so that a resumed run compares with the very same dialogues."""
        parts = {"scripted": self.scripted, "no_zopa": self.no_zopa, "self_play": self.self_play}
        return {key: None if part is None else part.state_dict() for key, part in parts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StageResult:
        """Restores what `state_dict` gave."""
        return cls(
            scripted=Measured.from_state(state["scripted"]),
            no_zopa=None if state["no_zopa"] is None else Measured.from_state(state["no_zopa"]),
            self_play=Measured.from_state(state["self_play"]),
        )
