"""The evaluation protocol: held-out scenarios, opponents never trained against, the same seeds at every stage.

Definitions of all measures: docs/metrics.md. Payoff is own utility on the 0-1 scale, the reservation value without a
deal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bupo.config import at_least, one_of, raise_problems
from bupo.coordinators.base import GameCoordinator
from bupo.intervals import clustered_bootstrap, paired_difference
from bupo.measures import PAIRED, Measured, StageResult, measure_all
from bupo.negotiation.frontier import analyse
from bupo.negotiation.opponents import EVALUATION_OPPONENTS
from bupo.negotiation.scenario import Scenario, ScenarioConfig, fingerprint, procurement
from bupo.policies.stacks import Stacks
from bupo.records import Episode
from bupo.rollout.dialogues import Seating, Table, play_dialogues
from bupo.tracking import Tracker

SIZES = ("quick", "full")
LEARNER = "policy"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The evaluation before and after training.

    Attributes:
        size: `quick`: 60 scenarios x 2 roles x 2 opponents = 240 dialogues a stage; `full`: 60 x 2 x 5 = 600 and 100
            without a ZOPA.
        scenarios: Scenarios with a ZOPA; 0 for 60, or 8 for a public base on a CPU.
        batch: Most dialogues decoded together.
    """

    size: str = "quick"
    scenarios: int = 0
    batch: int = 128

    def __post_init__(self) -> None:
        """Checks the size."""
        raise_problems(
            [
                one_of("size", self.size, SIZES),
                at_least("scenarios", self.scenarios, 0),
                at_least("batch", self.batch, 1),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The frozen set of dialogues of an evaluation.

    Attributes:
        seatings: Against scripted opponents; the learner's seat holds `policy`.
        no_zopa: Where walking away is right.
        self_play: The learner in both seats.
        hash: Fingerprint of the scenarios.
    """

    seatings: tuple[Seating, ...]
    no_zopa: tuple[Seating, ...]
    self_play: tuple[Seating, ...]
    hash: str


def _seating(scenario: Scenario, seat: int, opponent: str, seed: int) -> Seating:
    players = (LEARNER, opponent) if seat == 0 else (opponent, LEARNER)
    return Seating(scenario=scenario, players=players, seed=seed, learner=(seat == 0, seat == 1))


def stratified_scenarios(config: ScenarioConfig, count: int) -> list[Scenario]:
    """Held-out scenarios spread over the size of the ZOPA.

    A pool four times as large is sorted by its best egalitarian surplus and every fourth is taken, so that narrow and
    wide zones of agreement appear alike at every size.
    """
    pool = [procurement(config, seed) for seed in range(4 * count)]
    width = [float((s.utilities - np.array([[p.reservation] for p in s.profiles])).min(0).max()) for s in pool]
    return [pool[index] for index in np.argsort(width, kind="stable")[2::4]]


def protocol(config: ScenarioConfig, size: str, count: int = 0) -> Protocol:
    """Builds the dialogues of `quick` or `full` (facts: 60 scenarios x 2 roles x 5, and 10 without ZOPA x 2 x 5).

    `quick` is a part of `full`: the same scenarios, since intervals depend on their number first, and each opponent
    once a scenario, two in each role.
    """
    full = size == "full"
    opponents = list(EVALUATION_OPPONENTS)
    scenarios = stratified_scenarios(config, count or 60)
    seatings, no_zopa, both = [], [], []
    for index, scenario in enumerate(scenarios):
        for seat in (0, 1):
            for repeat in range(5 if full else 2):
                opponent = opponents[(repeat + 2 * seat + index) % 4]
                seatings.append(_seating(scenario, seat, opponent, 1000 * index + 10 * repeat + seat))
        for repeat in range(4 if full else 2):
            seed = 1000 * index + 500 + repeat
            both.append(Seating(scenario=scenario, players=(LEARNER, LEARNER), seed=seed, learner=(True, True)))
    if full:
        for index in range(10):
            scenario = procurement(config, 900_000 + index, zopa=False)
            for seat in (0, 1):
                for repeat in range(5):
                    opponent = opponents[(repeat + index) % 4]
                    no_zopa.append(_seating(scenario, seat, opponent, 90_000 + 100 * index + 10 * repeat + seat))
    everything = [*scenarios, *(s.scenario for s in no_zopa)]
    return Protocol(
        seatings=tuple(seatings), no_zopa=tuple(no_zopa), self_play=tuple(both), hash=fingerprint(everything)
    )


class Evaluation:
    """Runs the protocol for policies, scripted yardsticks and the ceiling."""

    def __init__(self, config: EvaluationConfig, scenarios: ScenarioConfig, tracker: Tracker) -> None:
        """Builds the frozen protocol and analyses its scenarios."""
        self.config = config
        self.tracker = tracker
        self.protocol = protocol(scenarios, config.size, config.scenarios)
        everything = [*self.protocol.seatings, *self.protocol.no_zopa, *self.protocol.self_play]
        self.scenarios = {s.scenario.name: s.scenario for s in everything}
        self.analyses = {name: analyse(scenario) for name, scenario in self.scenarios.items()}

    def stage(
        self,
        name: str,
        table: Table,
        stacks: Stacks,
        coordinator: GameCoordinator,
        *,
        seed: int,
        on_episode: Callable[[Seating, Episode], None] | None = None,
    ) -> StageResult:
        """Plays one stage.

        Args:
            name: Shown in the progress bar.
            table: What to play with.
            stacks: The policies to evaluate, acting through `coordinator`.
            coordinator: Their mixture.
            seed: Seeds sampling: with the same seed, a dialogue draws the same random numbers at every stage.
            on_episode: Told each finished dialogue.
        """
        parts = (self.protocol.seatings, self.protocol.no_zopa, self.protocol.self_play)
        total = sum(map(len, parts))
        record = on_episode or (lambda seating, episode: None)
        pools = {LEARNER: (stacks, coordinator)}
        measured: list[Measured] = []
        with self.tracker.progress(f"evaluate {name}", total, "dialogues") as bar:
            for part, seatings in enumerate(parts):
                episodes: list[Episode] = []
                for start in range(0, len(seatings), self.config.batch):
                    chunk = seatings[start : start + self.config.batch]
                    seen = 0

                    def told(done: int) -> None:
                        nonlocal seen
                        bar.update(advance=done - seen)
                        seen = done

                    draws = int(np.random.default_rng([seed, part, start]).integers(2**31))
                    episodes += play_dialogues(table, chunk, pools, draws, told)
                for seating, episode in zip(seatings, episodes, strict=True):
                    record(seating, episode)
                measured.append(measure_all(seatings, episodes, self.analyses))
        scripted, no_zopa, self_play = measured
        return StageResult(scripted=scripted, no_zopa=no_zopa if len(no_zopa) else None, self_play=self_play)

    def yardstick(self, player: str) -> Measured:
        """A scripted player in the learner's place, on the same seeds."""
        from bupo.negotiation.dialogue import play
        from bupo.negotiation.opponents import seat_player

        episodes = []
        for seating in self.protocol.seatings:
            names = tuple(player if name == LEARNER else name for name in seating.players)
            rng = np.random.default_rng([seating.seed, 0x5C])
            talkers = tuple(seat_player(name, seating.scenario, seat, rng) for seat, name in enumerate(names))
            episodes.append(play(seating.scenario, names, talkers).episode())  # pyright: ignore[reportArgumentType]
        return measure_all(self.protocol.seatings, episodes, self.analyses)

    def ceiling(self) -> dict[str, Any]:
        """Payoff of perfect play: the best own utility that leaves the other side at its reservation or above."""
        values, clusters = [], []
        for seating in self.protocol.seatings:
            seat = seating.learner.index(True)
            values.append(self.analyses[seating.scenario.name].ceiling[seat])
            clusters.append(seating.scenario.name)
        return clustered_bootstrap(np.array(values), np.array(clusters), draws=1000).as_dict()

    def paired(self, before: StageResult, after: StageResult) -> dict[str, Any]:
        """Differences on the same seeds, with intervals clustered by scenario."""
        return {
            key: paired_difference(
                after.scripted.values[key], before.scripted.values[key], after.scripted.scenario, draws=1000
            ).as_dict()
            for key in PAIRED
        }

    def deals(self, stages: Mapping[str, StageResult]) -> dict[str, Any]:
        """Deals in surplus shares of both sides, and the mean frontier, for the plot."""
        grid = np.linspace(0, 1, 41)
        curves = []
        for name in {s.scenario.name for s in self.protocol.seatings}:
            scenario, analysis = self.scenarios[name], self.analyses[name]
            shares = np.array(
                [
                    [(u - p.reservation) / (1 - p.reservation) for u, p in zip(pair, scenario.profiles, strict=True)]
                    for pair in analysis.frontier
                ]
            )
            for own in (0, 1):
                order = np.argsort(shares[:, own])
                curves.append(np.interp(grid, shares[order, own], shares[order, 1 - own]))
        points = {}
        for stage, result in stages.items():
            values = result.scripted.values
            agreed = values["agreement_rate"] == 1
            pairs = np.stack([values["surplus_share"], values["opponent_surplus_share"]], axis=1)[agreed]
            points[stage] = pairs.tolist()
        mean = np.mean(curves, axis=0)
        return {"stages": points, "frontier": [[float(x), float(y)] for x, y in zip(grid, mean, strict=True)]}
