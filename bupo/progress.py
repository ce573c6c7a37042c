"""Progress of a long phase: a bar in a terminal, an occasional line in a log file, nothing on other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_SECONDS = 15.0
"""Shortest time between two progress lines where the console is a log file."""


class ProgressBar(Protocol):
    """What `Tracker.progress` yields."""

    def update(self, advance: float = 1, note: str | None = None) -> None:
        """Moves on by ``advance`` units; ``note`` replaces the free text (None keeps it)."""
        ...


class Silent:
    """Shows nothing."""

    def update(self, advance: float = 1, note: str | None = None) -> None:
        """Does nothing."""


class _Bar:
    def __init__(self, display: Progress, description: str, total: float | None, unit: str) -> None:
        self._display = display
        self._task = display.add_task(description, total=total, unit=unit, note="")

    def update(self, advance: float = 1, note: str | None = None) -> None:
        if note is not None:
            self._display.update(self._task, note=literal(note).plain.replace("\n", " "))
        self._display.update(self._task, advance=advance)


class _Lines:
    """Progress for consoles that keep every line, such as a CI log."""

    def __init__(
        self,
        console: Console,
        description: str,
        total: float | None,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._description, self._total, self._unit = console, description, total, unit
        self._clock = clock
        self._start = self._last = clock()
        self._done = 0.0
        self._note = ""

    def update(self, advance: float = 1, note: str | None = None) -> None:
        self._done += advance
        self._note = self._note if note is None else note
        if self._clock() - self._last >= PLAIN_SECONDS:
            self._last = self._clock()
            self._print(self._remaining())

    def close(self) -> None:
        self._print("")

    def _remaining(self) -> str:
        if self._total is None or not 0 < self._done < self._total:
            return ""
        seconds = (self._clock() - self._start) / self._done * (self._total - self._done)
        return f", about {_duration(seconds)} left"

    def _print(self, remaining: str) -> None:
        count = f"{self._done:g}" if self._total is None else f"{self._done:g}/{self._total:g}"
        elapsed = _duration(self._clock() - self._start)
        line = f"{self._description}: {count} {self._unit}".rstrip() + f", {elapsed}{remaining}"
        if self._note:
            line += "  " + self._note.replace("\n", " ")
        self._console.print(literal(line), soft_wrap=True)


@contextmanager
def shown(console: Console, description: str, total: float | None, unit: str) -> Iterator[ProgressBar]:
    """A bar on an interactive console, lines on any other; see `Tracker.progress`."""
    if not console.is_interactive:
        lines = _Lines(console, description, total, unit)
        try:
            yield lines
        finally:
            lines.close()
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left", style="progress.remaining"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    ) as display:
        yield _Bar(display, description, total, unit)


def literal(text: str) -> Text:
    """Text that rich shows as it is: no markup, no emoji codes, no control characters but newline and tab."""
    return Text("".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160)))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
