"""What config sections check themselves with: rules that return a problem in words, and the error that holds all."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any


class ConfigError(ValueError):
    """Everything that is wrong with a configuration.

    Attributes:
        problems: one sentence for each mistake; each begins with the name of the field it is about.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        """Store the problems; a single string is one problem."""
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """List the problems one a line below their count."""
        count = len(self.problems)
        head = f"{count} problem{'' if count == 1 else 's'} in the configuration:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])


def raise_problems(problems: Iterable[str | None]) -> None:
    """Raise one `ConfigError` with all the problems that are not None; do nothing when there are none."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError(found)


def positive(name: str, value: object) -> str | None:
    """Rule: a finite number above zero."""
    return _number_rule(name, value, "above 0", lambda number: number > 0)


def at_least(name: str, value: object, low: float) -> str | None:
    """Rule: a finite number of at least `low`."""
    return _number_rule(name, value, f"of at least {low}", lambda number: number >= low)


def in_range(
    name: str, value: object, low: float, high: float, *, include_low: bool = True, include_high: bool = True
) -> str | None:
    """Rule: a finite number between `low` and `high`; each end belongs to the range unless told otherwise."""
    wanted = f"in {'[' if include_low else '('}{low}, {high}{']' if include_high else ')'}"

    def holds(number: float) -> bool:
        above = number >= low if include_low else number > low
        below = number <= high if include_high else number < high
        return above and below

    return _number_rule(name, value, wanted, holds)


def one_of(name: str, value: object, allowed: Iterable[object]) -> str | None:
    """Rule: one of the allowed values (a table such as ``COORDINATORS`` will do: its keys are the values)."""
    values = list(allowed)
    if value in values:
        return None
    close = difflib.get_close_matches(str(value), [str(item) for item in values], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name} must be one of {', '.join(repr(item) for item in values)}, got {value!r}{hint}"


def _number_rule(name: str, value: object, wanted: str, holds: Any) -> str | None:
    # bool is an int to Python, yet `size: true` is a mistake; NaN would pass or fail comparisons by their direction.
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and holds(value):
        return None
    return f"{name} must be a finite number {wanted}, got {value!r}"
