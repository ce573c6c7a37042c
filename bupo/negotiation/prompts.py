"""What a language model is told: a system prompt with role, goals and bounds, and one note with each message.

Everything that changes from turn to turn stands in the newest message, so a dialogue's tokens only ever grow at the
end. The note rates offers in points above or below the seat's own limit: with raw utilities small models agree below
their reservation far more often. No prompt mentions training.
"""

from __future__ import annotations

from bupo.negotiation.protocol import View, render_offer
from bupo.negotiation.scenario import BUYER, Issue, Scenario


def _issue_line(issue: Issue, points: tuple[int, ...]) -> str:
    steps = {points[i + 1] - points[i] for i in range(len(points) - 1)}
    gaps = {issue.values[i + 1] - issue.values[i] for i in range(len(points) - 1)}
    head = f"{issue.name}: {issue.label}, {issue.values[0]} to {issue.values[-1]} {issue.unit}"
    if len(steps) == 1 and len(gaps) == 1:
        step, gap = steps.pop(), gaps.pop()
        best = issue.values[-1] if step > 0 else issue.values[0]
        return f"{head}, best {best}, each {gap} away costs {abs(step)}"
    table = ", ".join(f"{value} gives {score}" for value, score in zip(issue.values, points, strict=True))
    return f"{head}: {table}"


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
    issues = "\n".join(
        _issue_line(issue, points) for issue, points in zip(scenario.issues, own.points, strict=True)
    )
    example = render_offer(scenario.issues, tuple(len(issue.values) // 2 for issue in scenario.issues))
    return (
        f"{role}\n{issues}\n"
        f"The best contract gives you 100 points. Your limit is {own.limit} points: no contract is better than less. "
        "Notes rate offers in points above (+) or below (-) your limit. Keep your numbers private.\n"
        f"Write one or two sentences and exactly one action: {example}, [Accept] or [Walk]."
    )


def _signed(points: int) -> str:
    return f"+{points}" if points >= 0 else f"-{-points}"


def turn_prompt(scenario: Scenario, view: View) -> str:
    """The message that a seat answers: the other side's words on one line, then the note."""
    profile = scenario.profiles[view.seat]
    parts = [f"Round {view.round} of {view.rounds}."]
    if view.round == view.rounds:
        parts.append("You have the last word." if view.last_word else "They have the last word.")
    if view.refusal is not None:
        parts.append(f"Your message was refused: {view.refusal}.")
    if view.standing is not None:
        parts.append(f"Their offer: {_signed(profile.score(view.standing) - profile.limit)}.")
    if view.own_last is not None:
        parts.append(f"Your last: {_signed(profile.score(view.own_last) - profile.limit)}.")
    note = f"({' '.join(parts)})"
    if view.other_text is None:
        return f"You open.\n{note}"
    # One line only, so that the other side's words cannot imitate a note on a line of its own.
    return f"{' '.join(view.other_text.split())}\n{note}"
