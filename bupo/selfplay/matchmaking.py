"""Who meets whom in an iteration: self-play, past selves and scripted training opponents in declared shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bupo.config import at_least, in_range, raise_problems
from bupo.negotiation.opponents import TRAINING_OPPONENTS
from bupo.negotiation.scenario import ScenarioConfig, procurement
from bupo.rollout.dialogues import Seating

LEARNER = "pool"
TRAINING_SEEDS = 1_000_000
"""Scenario seeds below are held out for evaluation, seeds from here on are for training."""


@dataclass(frozen=True, kw_only=True)
class InteractConfig:
    """The interact phase.

    Attributes:
        dialogues: Dialogues an iteration; 0 for 152, or 16 for a public base on a CPU.
        group_size: Copies of one scenario, role and opponent: the group whose mean reward is the baseline.
        self_play: Share of dialogues in which the current pool plays both seats.
        past: Share against past selves (none while the league is empty: those go to scripted opponents).
        scripted: Relative frequency of each scripted training opponent in the rest.
        league_every: A snapshot joins the league every so many iterations.
        league_size: Most snapshots kept.
        max_message_tokens: Longest message in tokens.
        retries: Refused messages in a row that a seat may repeat.
        shortcut: Whether a token is drawn from the proposal of one sub-policy that is drawn first, where the
            coordinator allows it: the same distribution with one head a row, worth it where the vocabulary is large;
            `ppo/rollout_mismatch` is unknown then. Evaluation never does: it would couple its stages less.
        compile: Whether decode steps are compiled, in evaluation too (`torch.compile`; on a CPU it needs a C++
            compiler): about a minute at first for faster steps, most on small bases. Differs in rounding alone.
    """

    dialogues: int = 0
    group_size: int = 8
    self_play: float = 0.15
    past: float = 0.1
    scripted: dict[str, float] | None = None
    league_every: int = 5
    league_size: int = 8
    max_message_tokens: int = 64
    retries: int = 1
    shortcut: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        """Checks the shares."""
        shares = self.scripted or {}
        unknown = [name for name in shares if name not in TRAINING_OPPONENTS]
        raise_problems(
            [
                at_least("group_size", self.group_size, 1),
                at_least("dialogues", self.dialogues, 0),
                f"dialogues: {self.dialogues} is less than one group of group_size = {self.group_size}"
                if 0 < self.dialogues < self.group_size
                else None,
                in_range("self_play", self.self_play, 0, 1),
                in_range("past", self.past, 0, 1),
                f"past: self_play + past is {self.self_play + self.past}, more than 1"
                if self.self_play + self.past > 1 + 1e-9
                else None,
                f"scripted: {', '.join(unknown)} cannot be trained against; allowed are {', '.join(TRAINING_OPPONENTS)}"
                if unknown
                else None,
                "scripted: shares must be >= 0 with a positive sum"
                if shares and (min(shares.values()) < 0 or sum(shares.values()) <= 0)
                else None,
                at_least("league_every", self.league_every, 1),
                at_least("league_size", self.league_size, 1),
                at_least("max_message_tokens", self.max_message_tokens, 8),
                at_least("retries", self.retries, 0),
            ]
        )


SCRIPTED_SHARES = {"firm": 0.3, "eager": 0.27, "random": 0.08, "micro": 0.32, "tough": 0.03}
"""`micro` gives only where it is given to: without it nothing teaches that holding out can cost the deal. `tough`
hardly ever deals and has a small share: it teaches not to."""


def draw_seatings(
    config: InteractConfig, scenarios: ScenarioConfig, league: Sequence[str], rng: np.random.Generator
) -> list[Seating]:
    """Draws an iteration's dialogues in groups of equal scenario, role and opponent.

    Args:
        config: Shares and sizes.
        scenarios: The family to draw scenarios from.
        league: Names of the past selves that may be met.
        rng: Randomness of the draw.

    Returns:
        At most `config.dialogues` seatings, a whole number of groups.

    Raises:
        ValueError: `config.dialogues` is less than one group (0 stands for a default that a run fills in).
    """
    if config.dialogues < config.group_size:
        raise ValueError(f"{config.dialogues} dialogues are less than one group of {config.group_size}")
    shares = config.scripted or SCRIPTED_SHARES
    names, weights = list(shares), np.array(list(shares.values()))
    groups = config.dialogues // config.group_size
    self_play = round(groups * config.self_play)
    past = round(groups * config.past) if league else 0
    seatings: list[Seating] = []
    for group in range(groups):
        scenario = procurement(scenarios, TRAINING_SEEDS + int(rng.integers(2**31)))
        role = int(rng.integers(2))
        if group < self_play:
            players, learner = (LEARNER, LEARNER), (True, True)
        else:
            against_past = group < self_play + past
            opponent = str(rng.choice(league) if against_past else rng.choice(names, p=weights / weights.sum()))
            players = (LEARNER, opponent) if role == 0 else (opponent, LEARNER)
            learner = (role == 0, role == 1)
        # One seed a group: what differs between its copies is what the learner did, not a scripted player's luck.
        seed = int(rng.integers(2**31))
        seatings += [
            Seating(scenario=scenario, players=players, seed=seed, learner=learner) for _ in range(config.group_size)
        ]
    return seatings
