"""Scripted players that speak. Time-dependent tactics, Tit-for-Tat, MiCRO, Random, Tough.

Aspiration form of time-dependent concession (Faratin, Sierra and Jennings 1998): u(t) = 1 - (1 - u_min) (t/T)^e with
e = 4 Boulware, 1 Linear, 1/4 Conceder. A player knows its own profile and the talk so far, nothing of the other's.
Evaluation opponents (`EVALUATION_OPPONENTS`) appear neither in SFT data nor in training, and use other phrasings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from bupo.negotiation.phrases import EVALUATION_PHRASES, TONES, TRAINING_PHRASES, PhraseBank
from bupo.negotiation.protocol import View, render_offer
from bupo.negotiation.scenario import Scenario
from bupo.records import Outcome


class ScriptedPlayer(ABC):
    """A player that follows a tactic: `target` sets its aspiration, everything else is shared.

    It accepts an offer that is worth at least what it would ask for next (AC_next, Baarslag et al. 2014), on its last
    message any offer at or above its limit, and answers a hopeless last message by walking away.
    """

    kept = 0.0
    """Share of its surplus below which the player asks for nothing: u_min = reservation + kept (1 - reservation)."""

    def __init__(self, scenario: Scenario, seat: int, rng: np.random.Generator, phrases: PhraseBank) -> None:
        """Takes a seat.

        Args:
            scenario: The problem; only this seat's profile is read.
            seat: The seat to play.
            rng: Randomness of tie-breaks and words.
            phrases: The bank to speak from.
        """
        self.scenario = scenario
        self.seat = seat
        self.rng = rng
        self.phrases = phrases
        self.tone = TONES[rng.integers(len(TONES))]
        self.profile = scenario.profiles[seat]
        self.floor = self.profile.reservation + self.kept * (1 - self.profile.reservation)
        self.utility_N = scenario.utilities[seat]
        spans = np.array([max(len(issue.values) - 1, 1) for issue in scenario.issues])
        self.scaled = scenario.outcomes / spans
        self.received: list[float] = []
        self.asked: list[float] = []

    @abstractmethod
    def target(self, view: View) -> float:
        """The own utility that the player asks for now."""

    def propose(self, view: View, target: float) -> Outcome:
        """The outcome worth at least `target` that looks most like the other side's offer, else the cheapest one."""
        good = np.flatnonzero(self.utility_N >= max(target, self.floor) - 1e-9)
        if view.standing is None:
            cost = self.utility_N[good]
        else:
            spans = [max(len(issue.values) - 1, 1) for issue in self.scenario.issues]
            standing = np.asarray(view.standing) / np.asarray(spans)
            cost = np.abs(self.scaled[good] - standing).sum(1) + 0.5 * self.utility_N[good]
        best = good[np.flatnonzero(cost <= cost.min() + 1e-9)]
        return tuple(int(i) for i in self.scenario.outcomes[self.rng.choice(best)])

    def accepts(self, view: View, standing: float, asking: float) -> bool:
        """Whether an offer worth `standing` is taken rather than asking for `asking`."""
        own_last_message = view.round == view.rounds
        return standing >= self.profile.reservation and (standing >= asking - 1e-9 or own_last_message)

    def speak(self, view: View) -> str:
        """The player's next message."""
        standing = None if view.standing is None else self.profile.score(view.standing) / 100
        if standing is not None:
            self.received.append(standing)
        outcome = self.propose(view, self.target(view))
        asking = self.profile.score(outcome) / 100
        if standing is not None and self.accepts(view, standing, asking):
            return self.phrases.say(self.rng, "accept", self.tone, "[Accept]")
        if view.last_word:
            return self.phrases.say(self.rng, "walk", self.tone, "[Walk]")
        situation = "open" if not self.asked else "concede" if asking < self.asked[-1] - 1e-9 else "hold"
        self.asked.append(asking)
        return self.phrases.say(self.rng, situation, self.tone, render_offer(self.scenario.issues, outcome))

    def clock(self, view: View) -> float:
        """Share of the player's own time that has passed: 0 on its first message, 1 on its last."""
        return (view.round - 1) / max(view.rounds - 1, 1)


class TimeDependent(ScriptedPlayer):
    """u(t) = 1 - (1 - u_min) (t/T)^exponent."""

    exponent = 1.0

    def target(self, view: View) -> float:
        """Aspiration at this time."""
        return 1 - (1 - self.floor) * self.clock(view) ** self.exponent


class Boulware(TimeDependent):
    """Concedes at the end (e = 4)."""

    exponent = 4.0


class Linear(TimeDependent):
    """Concedes steadily (e = 1)."""


class Conceder(TimeDependent):
    """Concedes at once (e = 1/4)."""

    exponent = 0.25


class Stepwise(TimeDependent):
    """A time-dependent player that moves its last offer step by step towards the other side's, cheapest issue first.

    Giving where it costs least is what logrolling asks of each side; and each message differs from the player's last
    one by a step or two, which a small model can learn to do. Its time runs to the last offer that can be answered:
    what comes with the last word is no offer any more.
    """

    kept = 0.12

    def clock(self, view: View) -> float:
        """Share of the player's own time that has passed: 0 with its first offer, 1 with the last one that counts."""
        total = view.answerable + view.round - 1
        return 1 - max(view.answerable - 1, 0) / max(total - 1, 1)

    def propose(self, view: View, target: float) -> Outcome:
        """Its last offer, moved towards the other side's as far as `target` allows."""
        if view.own_last is None or view.standing is None:
            return super().propose(view, target)
        offer, theirs = list(view.own_last), view.standing
        spare = self.profile.score(view.own_last) - 100 * max(target, self.floor) + 1e-6

        def loss(issue: int) -> int:
            """Points lost by the next step on an issue."""
            table, ahead = self.profile.points[issue], theirs[issue] > offer[issue]
            return table[offer[issue]] - table[offer[issue] + (1 if ahead else -1)]

        open_issues = [issue for issue, value in enumerate(theirs) if value != offer[issue]]
        for issue in sorted(open_issues, key=loss):
            while offer[issue] != theirs[issue] and loss(issue) <= spare:
                spare -= loss(issue)
                offer[issue] += 1 if theirs[issue] > offer[issue] else -1
        return tuple(offer)


class Firm(Stepwise):
    """Training tactic between Linear and Boulware (e = 2); keeps a margin above its limit."""

    exponent = 2.0


class Eager(Stepwise):
    """Training tactic between Conceder and Linear (e = 1/2); keeps a margin above its limit."""

    exponent = 0.5


class TitForTat(ScriptedPlayer):
    """Naive Tit-for-Tat: gives back, in own utility, what the other side's last move gave it."""

    def target(self, view: View) -> float:
        """The last ask less the gain just received; at the end it settles for its limit like everyone."""
        if len(self.received) < 2 or not self.asked:
            return 1.0 if not self.asked else self.asked[-1]
        gift = max(self.received[-1] - self.received[-2], 0.0)
        return max(self.asked[-1] - gift, self.profile.reservation)


class Micro(ScriptedPlayer):
    """MiCRO (de Jonge 2022): one new outcome of descending own utility for each new offer of the other side.

    The original takes the deadline to leave room for its whole ranking. Where it does not, the ranking is cut into as
    many bands as it has offers that can be answered, and a band is what an outcome was: it moves one band on for each
    offer in a band that it has not seen. Who gives a new band each time finds it at its limit with the last of them;
    who stays in one is answered by nothing new.
    """

    def __init__(self, scenario: Scenario, seat: int, rng: np.random.Generator, phrases: PhraseBank) -> None:
        """Sorts the outcomes by own utility, ties at random."""
        super().__init__(scenario, seat, rng, phrases)
        self.ranking = np.lexsort((rng.random(len(self.utility_N)), -self.utility_N))
        self.rank = {tuple(outcome): place for place, outcome in enumerate(scenario.outcomes[self.ranking].tolist())}
        self.last = int((self.utility_N >= self.profile.reservation - 1e-9).sum()) - 1
        self.steps = -1
        self.seen: set[int] = set()

    def target(self, view: View) -> float:
        """Utility of the next outcome in the ranking."""
        band = -1 if view.standing is None else int(self.rank[view.standing] / self.stride(view))
        if self.steps < 0 or (view.standing is not None and band not in self.seen):
            self.steps += 1
        self.seen.add(band)
        return float(self.utility_N[self.ranking[self.place(view)]])

    def stride(self, view: View) -> float:
        """Outcomes in a band."""
        return max(self.last / max(view.answerable + view.round - 2, 1), 1.0)

    def place(self, view: View) -> int:
        """Where in the ranking it stands now."""
        return min(round(self.steps * self.stride(view)), self.last)

    def propose(self, view: View, target: float) -> Outcome:
        """Exactly the outcome that the ranking names."""
        return tuple(int(i) for i in self.scenario.outcomes[self.ranking[self.place(view)]])


class Random(ScriptedPlayer):
    """Asks for a random outcome each time, with a margin above its limit."""

    kept = 0.12

    def target(self, view: View) -> float:
        """A random utility among the outcomes that it asks for."""
        rational = self.utility_N[self.utility_N >= self.floor - 1e-9]
        return float(self.rng.choice(rational))

    def propose(self, view: View, target: float) -> Outcome:
        """A random outcome of just that utility."""
        same = np.flatnonzero(np.abs(self.utility_N - target) < 1e-9)
        return tuple(int(i) for i in self.scenario.outcomes[self.rng.choice(same)])


class Tough(ScriptedPlayer):
    """Never concedes: asks for at least 90% of its surplus to the end, and takes nothing less."""

    def target(self, view: View) -> float:
        """The same high aspiration at all times."""
        return 0.1 * self.profile.reservation + 0.9

    def accepts(self, view: View, standing: float, asking: float) -> bool:
        """Takes only what it asks for."""
        return standing >= self.target(view) - 1e-9


TRAINING_OPPONENTS: dict[str, type[ScriptedPlayer]] = {
    "firm": Firm,
    "eager": Eager,
    "random": Random,
    "micro": Micro,
    "tough": Tough,
}
EVALUATION_OPPONENTS: dict[str, type[ScriptedPlayer]] = {
    "boulware": Boulware,
    "linear": Linear,
    "conceder": Conceder,
    "tit_for_tat": TitForTat,
}


def seat_player(name: str, scenario: Scenario, seat: int, rng: np.random.Generator) -> ScriptedPlayer:
    """Seats a scripted player by name, with the phrase bank that belongs to its set.

    Raises:
        KeyError: No such player; the message lists those there are.
    """
    if name in TRAINING_OPPONENTS:
        return TRAINING_OPPONENTS[name](scenario, seat, rng, TRAINING_PHRASES)
    if name in EVALUATION_OPPONENTS:
        return EVALUATION_OPPONENTS[name](scenario, seat, rng, EVALUATION_PHRASES)
    raise KeyError(f"no scripted player {name!r}; there are {', '.join([*TRAINING_OPPONENTS, *EVALUATION_OPPONENTS])}")
