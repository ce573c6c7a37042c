"""One dialogue while it is going on: the mechanism, both seats' notes, the record; and plain play between talkers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bupo.negotiation.prompts import system_prompt, turn_prompt
from bupo.negotiation.protocol import Mechanism, View
from bupo.negotiation.scenario import Scenario
from bupo.records import Action, Episode, TokenSpan, Turn


class Talker(Protocol):
    """Anything that answers a view with a message: a scripted player, later a remote one or a person."""

    def speak(self, view: View) -> str:
        """The next message of the seat."""
        ...


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a seat was told and what it answered, for SFT.

    Attributes:
        prompt: The user message of this turn.
        reply: The seat's message.
        valid: Whether the mechanism took it.
    """

    prompt: str
    reply: str
    valid: bool


class Dialogue:
    """A negotiation in progress: asks for nothing, is told each message, ends in an Episode."""

    def __init__(self, scenario: Scenario, players: tuple[str, str], retries: int = 1) -> None:
        """Opens the dialogue.

        Args:
            scenario: The problem.
            players: Name of the player in each seat, for the record.
            retries: Refused messages in a row that a seat may repeat.
        """
        self.scenario = scenario
        self.players = players
        self.mechanism = Mechanism(scenario.issues, scenario.rounds, scenario.opener, retries)
        self.turns: list[Turn] = []
        self.exchanges: tuple[list[Exchange], list[Exchange]] = ([], [])

    @property
    def done(self) -> bool:
        """Whether the negotiation has ended."""
        return self.mechanism.status is not None

    @property
    def seat(self) -> int:
        """The seat to act."""
        return self.mechanism.seat

    def system(self, seat: int) -> str:
        """The seat's system prompt."""
        return system_prompt(self.scenario, seat)

    def prompt(self) -> str:
        """The user message for the seat to act."""
        return turn_prompt(self.scenario, self.mechanism.view())

    def take(self, text: str, tokens: TokenSpan | None = None) -> Action:
        """Takes the message of the seat to act and records it."""
        seat, prompt = self.seat, self.prompt()
        action = self.mechanism.step(text)
        self.turns.append(Turn(seat=seat, text=text, action=action, tokens=tokens))
        self.exchanges[seat].append(Exchange(prompt=prompt, reply=text, valid=action.kind != "invalid"))
        return action

    def episode(self) -> Episode:
        """The finished record.

        Raises:
            RuntimeError: The dialogue is still going on.
        """
        mechanism = self.mechanism
        if mechanism.status is None:
            raise RuntimeError("the dialogue has not ended: there is no episode yet")
        deal, profiles = mechanism.deal, self.scenario.profiles
        buyer, supplier = (p.reservation if deal is None else p.score(deal) / 100 for p in profiles)
        surplus_buyer, surplus_supplier = (0.0 if deal is None else p.surplus(deal) for p in profiles)
        return Episode(
            scenario=self.scenario.name,
            players=self.players,
            opener=mechanism.opener,
            status=mechanism.status,
            deal=deal,
            blame=mechanism.blame,
            rounds=mechanism.used_rounds,
            turns=tuple(self.turns),
            utilities=(buyer, supplier),
            surplus=(surplus_buyer, surplus_supplier),
        )


def play(scenario: Scenario, players: tuple[str, str], talkers: tuple[Talker, Talker], retries: int = 1) -> Dialogue:
    """Plays a negotiation between two talkers to its end."""
    dialogue = Dialogue(scenario, players, retries)
    while not dialogue.done:
        dialogue.take(talkers[dialogue.seat].speak(dialogue.mechanism.view()))
    return dialogue
