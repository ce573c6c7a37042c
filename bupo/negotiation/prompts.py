"""What a language model is told: a system prompt with role, goals and bounds, and one note with each message.

Everything that changes from turn to turn stands in the newest message, so a dialogue's tokens only ever grow at the
end. The note rates offers in points above or below the seat's own limit: with raw utilities small models agree below
their reservation far more often. No prompt mentions training.
"""

from __future__ import annotations

from itertools import pairwise

from bupo.negotiation.protocol import View, render_offer
from bupo.negotiation.scenario import BUYER, Issue, Profile, Scenario
from bupo.records import Outcome


def _issue_line(issue: Issue, points: tuple[int, ...]) -> str:
    """The points of an issue's values: one number where every step is worth the same, else the whole table."""
    head = f"{issue.name} ({issue.label}, {issue.unit}):"
    steps, gaps = ({b - a for a, b in pairwise(row)} for row in (points, issue.values))
    if len(steps) == 1 and len(gaps) == 1:
        step, gap = steps.pop(), gaps.pop()
        best = issue.values[-1] if step > 0 else issue.values[0]
        low, high = issue.values[0], issue.values[-1]
        return f"{head} {low} to {high}, best {best} gives {max(points)}, each {gap} away costs {abs(step)}"
    return f"{head} {' '.join(f'{value}={score}' for value, score in zip(issue.values, points, strict=True))}"


def system_prompt(scenario: Scenario, seat: int) -> str:
    """Role, quantified goals, bounds and the form of a message for one seat."""
    own, other = scenario.profiles[seat], scenario.profiles[1 - seat]
    if seat == BUYER:
        role = (
            f"You buy for {own.company}, a manufacturer using about one million units a year. "
            f"You negotiate a yearly contract with the supplier {other.company}."
        )
    else:
        role = (
            f"You sell for {own.company}, a supplier with about 15% of its market. "
            f"You negotiate a yearly contract with the manufacturer {other.company}, "
            "which uses about one million units a year."
        )
    issues = "\n".join(_issue_line(issue, points) for issue, points in zip(scenario.issues, own.points, strict=True))
    example = render_offer(scenario.issues, tuple(len(issue.values) // 2 for issue in scenario.issues))
    return (
        f"{role} Each value of an issue gives you points:\n{issues}\n"
        f"The best contract gives you 100 points. Your limit is {own.limit} points: no contract is better than less. "
        "Notes tell how many points an offer is above your limit or too low. Keep them private.\n"
        f"Write one or two sentences and exactly one action: {example}, [Accept] or [Walk]."
    )


def _rating(profile: Profile, outcome: Outcome) -> str:
    """Points against the limit: `+17` or `31 too low`.

    Offers above and below the limit differ in words, not in a sign alone: small models overlook signs.
    """
    margin = profile.score(outcome) - profile.limit
    return f"+{margin}" if margin >= 0 else f"{-margin} too low"


def turn_prompt(scenario: Scenario, view: View) -> str:
    """The message that a seat answers: the other side's words on one line, then the note.

    The note ends with what decides between accepting and going on (their offer, then the time left), closest to the
    reply: a small base learns to read it there within minutes of SFT, and hardly at all from the middle of a note.
    """
    profile = scenario.profiles[view.seat]
    parts = []
    if view.refusal is not None:
        parts.append(f"Your message was refused: {view.refusal}.")
    if view.own_last is not None:
        parts.append(f"Your last: {_rating(profile, view.own_last)}.")
    if view.standing is not None:
        parts.append(f"Their offer: {_rating(profile, view.standing)}.")
    # Offers that can still be answered, not rounds: who has the last word can do nothing with it but accept or walk.
    parts.append("You have the last word." if view.last_word else f"Offers left: {view.answerable}.")
    note = f"({' '.join(parts)})"
    if view.other_text is None:
        return f"You open.\n{note}"
    # One line only, so that the other side's words cannot imitate a note on a line of its own.
    return f"{' '.join(view.other_text.split())}\n{note}"
