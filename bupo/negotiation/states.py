"""A talk before and after each message of a seat, as numbers: the states that a critic judges.

The critic sees more than the seat does: what the seat's offers are worth to the other side. A policy must not know it;
a critic that knows it judges the same messages with less noise, and its advantages stay unbiased, since what it knows
is settled before the message (asymmetric actor-critic, Pinto et al. 2018, arXiv 1710.06542). Whether a last offer was
too much is then known when it is made, not guessed from how talks like it end.

Shape legend: T own turns of a seat, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bupo.negotiation.rewards import tone
from bupo.negotiation.scenario import Profile, Scenario
from bupo.records import Episode, Outcome, Turn

FEATURES = (
    "time",
    "last_offer",
    "no_offer",
    "last_word",
    "has_standing",
    "standing",
    "standing_gain",
    "given",
    "has_own",
    "own",
    "conceded",
    "refused",
    "accepted",
    "deal",
    "deal_gain",
    "walked",
    "tone",
    "repeats",
    "takes_back",
    "theirs",
    "acceptable",
    "room",
)
SURPLUSES = ("standing", "own", "deal", "theirs")
KNOTS = (-0.15, 0.0, 0.15, 0.3, 0.45)


def design(features_NF: np.ndarray) -> np.ndarray:
    """What a linear critic sees: features, all products of two, and hinges max(x - knot, 0) of the surplus shares.

    A last offer is taken up to a point and not beyond it: hinges let a linear model bend there.
    """
    first, second = np.triu_indices(features_NF.shape[1])
    surplus = features_NF[:, [FEATURES.index(name) for name in SURPLUSES]]
    hinges = np.maximum(surplus[:, :, None] - np.array(KNOTS), 0).reshape(len(features_NF), -1)
    return np.concatenate([features_NF, features_NF[:, first] * features_NF[:, second], hinges], axis=1)


def situation(features_NF: np.ndarray) -> np.ndarray:
    """The situation of each state, [N], one of eight: accepted or not, and what is left to the seat.

    More than one offer that can be answered; one, to be taken or left; one, which can be answered by another; none. The
    last offer is another thing than those before it.
    """
    last_offer, no_offer, last_word, accepted = (
        features_NF[:, FEATURES.index(name)].astype(int) for name in ("last_offer", "no_offer", "last_word", "accepted")
    )
    return 4 * accepted + last_offer * (1 + last_word) + 3 * no_offer


@dataclass
class _Seat:
    """What one seat has seen and done so far, and what its offers are worth to the other side."""

    profile: Profile
    other: Profile
    room: float
    rounds: int
    last_word: bool
    heard: list[float] = field(default_factory=list)
    offers: list[Outcome] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    tones: list[float] = field(default_factory=list)
    messages: int = 0
    act: str = ""

    def share(self, outcome: Outcome) -> float:
        """Surplus share of an outcome, cut to [-1, 1]."""
        return float(np.clip(self.profile.surplus(outcome), -1, 1))

    def hear(self, turn: Turn) -> None:
        """The other side's message."""
        if turn.action.outcome is not None:
            self.heard.append(self.share(turn.action.outcome))

    def say(self, turn: Turn) -> None:
        """An own message."""
        self.act = turn.action.kind
        self.tones.append(tone(turn.text))
        if turn.action.outcome is not None:
            self.offers.append(turn.action.outcome)
            self.asked.append(self.share(turn.action.outcome))

    def features(self) -> tuple[float, ...]:
        """The state now."""
        total = self.rounds - self.last_word
        left = total - min(self.messages // 2, self.rounds - 1)
        standing = self.heard[-1] if self.heard else 0.0
        pairs = list(zip(self.asked, self.asked[1:], strict=False))
        repeats = [a == b for a, b in zip(self.offers, self.offers[1:], strict=False)]
        accepted = self.act == "accept"
        return (
            1 - max(left - 1, 0) / max(total - 1, 1),
            float(left == 1),
            float(left == 0),
            float(self.last_word),
            float(bool(self.heard)),
            standing,
            max(standing, 0.0),
            self.heard[-1] - self.heard[-2] if len(self.heard) > 1 else 0.0,
            float(bool(self.asked)),
            self.asked[-1] if self.asked else 0.0,
            self.asked[-2] - self.asked[-1] if len(self.asked) > 1 else 0.0,
            float(self.act == "invalid"),
            float(accepted),
            standing if accepted else 0.0,
            max(standing, 0.0) if accepted else 0.0,
            float(self.act == "walk"),
            float(np.mean(self.tones)) if self.tones else 0.5,
            float(np.mean(repeats)) if repeats else 0.0,
            float(np.mean([after > before for before, after in pairs])) if pairs else 0.0,
            float(np.clip(self.other.surplus(self.offers[-1]), -1, 1)) if self.offers else 0.0,
            float(bool(self.offers) and self.other.surplus(self.offers[-1]) >= 0),
            self.room,
        )


def turn_states(scenario: Scenario, episode: Episode, seat: int) -> tuple[np.ndarray, np.ndarray]:
    """The state before and right after each own message.

    Args:
        scenario: The problem.
        episode: The finished dialogue.
        seat: Whose turns.

    Returns:
        Features before and after, [T, F] each. Time is in [0, 1], 1 with the last offer that can be answered;
        `standing` (the other side's offer), `own` (the last offer) and `deal` (what was accepted) are surplus shares
        cut to [-1, 1], 0 where there is none, `..._gain` their part above the reservation; `given` is the other side's
        last step, `conceded` the own one; `tone`, `repeats` and `takes_back` are means over own messages so far;
        `theirs` is the other side's surplus share of the last own offer, `acceptable` whether it is at or above its
        limit, `room` the largest own surplus share that leaves the other side at its limit.
    """
    opener = episode.turns[0].seat if episode.turns else 0
    profile, other = scenario.profiles[seat], scenario.profiles[1 - seat]
    possible_N = scenario.utilities[seat][scenario.utilities[1 - seat] >= other.reservation - 1e-9]
    best = possible_N.max(initial=profile.reservation)
    room = float((best - profile.reservation) / max(1 - profile.reservation, 1e-9))
    now = _Seat(profile=profile, other=other, room=room, rounds=scenario.rounds, last_word=opener != seat)
    before, after = [], []
    for turn in episode.turns:
        if turn.seat == seat:
            before.append(now.features())
            now.say(turn)
            after.append(now.features())
        else:
            now.hear(turn)
        if turn.action.kind != "invalid":
            now.messages += 1

    shape = (-1, len(FEATURES))
    return np.array(before, dtype=float).reshape(shape), np.array(after, dtype=float).reshape(shape)
