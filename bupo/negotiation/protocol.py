"""Alternating offers with text: reading one action from a message, and the mechanism that owns legality and the end.

The mechanism knows the agenda and the deadline, never a private utility. It reads only the message of the seat whose
turn it is, so nothing that the other side wrote or quoted can act for that seat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bupo.negotiation.scenario import Issue
from bupo.records import Action, Outcome, Status

_ACTION = re.compile(r"\[\s*(offer|accept|walk)\b([^\[\]]*)\]", re.IGNORECASE)
# The look-behind lets a name start only where a run of letters starts: long words cost linear, not quadratic, time.
_PAIR = re.compile(r"(?<![a-z_])([a-z_]+)\s*[=:]\s*([^\s,;]+(?:,\d{3})*)", re.IGNORECASE)
_NUMBER = re.compile(r"\$?(\d{1,3}(?:,\d{3})+|\d+)(?:\.0+)?k?")


def render_offer(issues: Sequence[Issue], outcome: Outcome) -> str:
    """Writes an offer action, e.g. `[Offer: price=900, payment=45, moq=20]`."""
    pairs = (f"{issue.name}={issue.values[index]}" for issue, index in zip(issues, outcome, strict=True))
    return f"[Offer: {', '.join(pairs)}]"


def _invalid(problem: str) -> Action:
    return Action(kind="invalid", problem=problem)


def parse_action(issues: Sequence[Issue], text: str) -> Action:
    """Reads the one bracketed action of a message.

    Args:
        issues: The agenda, which tells the allowed names and values.
        text: The message; untrusted, only matched against patterns.

    Returns:
        The action; kind `invalid` with a problem that says what came and what is allowed.
    """
    found = _ACTION.findall(text)
    allowed = "[Offer: " + ", ".join(f"{issue.name}=..." for issue in issues) + "], [Accept] or [Walk]"
    if len(found) != 1:
        came = "no action" if not found else f"{len(found)} actions"
        return _invalid(f"the message has {came}; end it with exactly one of {allowed}")
    verb, body = found[0][0].lower(), found[0][1].strip()
    if verb != "offer":
        if body:
            return _invalid(f"[{verb.capitalize()}] takes nothing else in its brackets")
        return Action(kind="accept" if verb == "accept" else "walk")
    pairs = _PAIR.findall(body.lstrip(":"))
    values: dict[str, str] = {}
    for name, value in pairs:
        if name.lower() in values:
            return _invalid(f"{name} is given twice")
        values[name.lower()] = value
    names = [issue.name for issue in issues]
    if sorted(values) != sorted(names):
        return _invalid(f"an offer names each of {', '.join(names)} once; this one names {', '.join(values) or 'none'}")
    outcome: list[int] = []
    for issue in issues:
        match = _NUMBER.fullmatch(values[issue.name])
        number = int(match[1].replace(",", "")) if match and len(match[1]) < 16 else None
        if number not in issue.values:
            options = ", ".join(map(str, issue.values))
            return _invalid(f"{issue.name} must be one of {options} {issue.unit}")
        outcome.append(issue.values.index(number))
    return Action(kind="offer", outcome=tuple(outcome))


@dataclass(frozen=True, kw_only=True)
class View:
    """What the seat to act may know of the talk's state (no utilities: those are added from its own profile).

    Attributes:
        seat: The seat that acts.
        round: Current round, from 1.
        rounds: The deadline in rounds.
        other_text: The other side's latest message, None before its first.
        standing: The other side's offer that may be accepted now, None if there is none.
        own_last: The seat's own latest offer, None before its first.
        answerable: How many more offers of the seat, one made now included, the other side can still answer; 0 for the
            message that no other follows.
        refusal: Why the seat's previous message was refused, None if it was not.
    """

    seat: int
    round: int
    rounds: int
    other_text: str | None
    standing: Outcome | None
    own_last: Outcome | None
    answerable: int
    refusal: str | None

    @property
    def last_word(self) -> bool:
        """Whether no message follows this one."""
        return self.answerable == 0


class Mechanism:
    """One negotiation: whose turn it is, which offer stands, when it ends and how."""

    def __init__(self, issues: Sequence[Issue], rounds: int, opener: int, retries: int = 1) -> None:
        """Opens the negotiation.

        Args:
            issues: The agenda.
            rounds: The deadline; a round is one message of each side.
            opener: The seat that speaks first.
            retries: How many refused messages in a row a seat may repeat; one more ends the talk as `invalid`.
        """
        self.issues = issues
        self.rounds = rounds
        self.opener = opener
        self.retries = retries
        self.messages = 0
        self.seat = opener
        self.offers: list[Outcome | None] = [None, None]
        self.texts: list[str | None] = [None, None]
        self.refusal: str | None = None
        self.refused_in_a_row = 0
        self.status: Status | None = None
        self.deal: Outcome | None = None
        self.blame: int | None = None

    def view(self) -> View:
        """What the seat to act sees."""
        other = 1 - self.seat
        return View(
            seat=self.seat,
            round=self.messages // 2 + 1,
            rounds=self.rounds,
            other_text=self.texts[other],
            standing=self.offers[other],
            own_last=self.offers[self.seat],
            answerable=(2 * self.rounds - self.messages) // 2,
            refusal=self.refusal,
        )

    @property
    def used_rounds(self) -> float:
        """Rounds used so far; half a round is one message."""
        return self.messages / 2

    def step(self, text: str) -> Action:
        """Takes the message of the seat whose turn it is.

        Args:
            text: The message.

        Returns:
            What was read from it. A refused message leaves the turn where it is until the retries are used up.

        Raises:
            RuntimeError: The negotiation has ended: this is a fault of the caller, not of a player.
        """
        if self.status is not None:
            raise RuntimeError(f"the negotiation has ended ({self.status}): no more messages are taken")
        action = parse_action(self.issues, text)
        if action.kind == "accept" and self.offers[1 - self.seat] is None:
            action = _invalid("there is no offer of the other side to accept")
        if action.kind == "invalid":
            self.refusal = action.problem
            self.refused_in_a_row += 1
            if self.refused_in_a_row > self.retries:
                self.status, self.blame = "invalid", self.seat
            return action
        self.refusal, self.refused_in_a_row = None, 0
        self.messages += 1
        self.texts[self.seat] = text
        if action.kind == "accept":
            self.status, self.deal = "deal", self.offers[1 - self.seat]
        elif action.kind == "walk":
            self.status, self.blame = "walk", self.seat
        else:
            self.offers[self.seat] = action.outcome
            if self.messages == 2 * self.rounds:
                self.status = "timeout"
        self.seat = 1 - self.seat
        return action
