"""What a seat knew at each of its turns, as numbers: the state that a critic judges.

Shape legend: T own turns of a seat, F features.
"""

from __future__ import annotations

import numpy as np

from bupo.negotiation.scenario import Scenario
from bupo.records import Episode

FEATURES = (
    "time",
    "last_round",
    "has_standing",
    "standing",
    "standing_gain",
    "has_own",
    "own",
    "refused",
    "standing_gain x time",
    "own x time",
    "standing_gain x last_round",
)


def turn_states(scenario: Scenario, episode: Episode, seat: int) -> np.ndarray:
    """The state before each own turn, from what the seat itself could see.

    Args:
        scenario: The problem; only the seat's own profile is read.
        episode: The finished dialogue.
        seat: Whose turns.

    Returns:
        Features by turn, [T, F]: time in [0, 1], surplus shares of the other side's standing offer and of the own last
        offer (cut to [-1, 1]; 0 where there is none), their gains above the reservation, flags, and products with time.
    """
    profile, messages, refused = scenario.profiles[seat], 0, False
    surplus: list[float | None] = [None, None]
    states = []
    for turn in episode.turns:
        if turn.seat == seat:
            time = (messages // 2) / max(scenario.rounds - 1, 1)
            last = float(messages // 2 == scenario.rounds - 1)
            standing, own = (surplus[1 - seat], surplus[seat])
            value, gain = standing or 0.0, max(standing or 0.0, 0.0)
            asked = own or 0.0
            flags = (float(standing is not None), float(own is not None))
            states.append(
                (
                    time,
                    last,
                    flags[0],
                    value,
                    gain,
                    flags[1],
                    asked,
                    float(refused),
                    gain * time,
                    asked * time,
                    gain * last,
                )
            )
        refused = turn.action.kind == "invalid"
        if not refused:
            messages += 1
        if turn.action.outcome is not None:
            surplus[turn.seat] = float(np.clip(profile.surplus(turn.action.outcome), -1, 1))
    return np.array(states, dtype=float).reshape(-1, len(FEATURES))
