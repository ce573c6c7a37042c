"""What a run leaves behind and shows: the run folder, its JSON files, and the console.

``metrics.jsonl`` (one line an iteration) is the one source of plots and reports. Every file written here is strict
JSON, so that any tool can read it; on processes other than the main one all calls are silent no-ops.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat

from rich.console import Console
from rich.table import Table

from bupo.progress import ProgressBar, Silent, literal, shown

METRICS = "metrics"
CHECKPOINTS = "checkpoints"

Metric = SupportsFloat | str | None


class RunFolderError(FileExistsError):
    """The run folder cannot be used as asked: it holds another run, or nothing to resume."""


def prepare_run_folder(path: str | Path, resume: bool = False) -> Path:
    """Creates the folder of a new run, or checks that of a resumed one.

    Call it on the main process, before any other writes there. Hidden files do not count as content.

    Args:
        path: The run folder (``--output_dir``).
        resume: Whether to continue the run found there.

    Returns:
        The folder.

    Raises:
        RunFolderError: If a new run would mix with existing content, or there is no checkpoint to resume from.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose a folder with --output_dir")
    content = _visible(folder)
    if resume and not _visible(folder / CHECKPOINTS):
        found = f"it holds {_some(content)}" if content else "it is empty or missing"
        start = "with another --output_dir" if content else "by leaving --resume out"
        raise RunFolderError(
            f"nothing to resume: no checkpoint in {folder / CHECKPOINTS} ({found}). "
            f"Check --output_dir, or start a new run {start}."
        )
    if content and not resume:
        raise RunFolderError(
            f"{folder} is not empty (it holds {_some(content)}). "
            "Continue that run with --resume, or choose another --output_dir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tracker:
    """Writes the records of one run and talks to the console, on the main process only.

    Text from outside (model messages, notes, table cells) is shown literally: console markup and terminal control
    characters in it have no effect.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_main: bool = True,
        console: Console | None = None,
        forward: Callable[[dict[str, float | int], int], None] | None = None,
    ) -> None:
        """Opens the records of a run.

        Args:
            run_dir: Folder of the run; created when missing.
            is_main: Whether this is the main process; elsewhere every method does nothing.
            console: Where to print; by default standard output.
            forward: Receives (metrics, iteration) with the finite numbers of each `log`, for example
                ``lambda metrics, step: accelerator.log(metrics, step=step)``.
        """
        self.run_dir = Path(run_dir)
        self.is_main = is_main
        self.console = console or Console()
        self._forward = forward
        self._warned: set[str] = set()
        if is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Appends the metrics of one iteration to ``metrics.jsonl`` and forwards the numbers.

        A non-finite number is written as null, with one warning for its key.

        Args:
            step: The iteration, written under ``"iteration"``.
            metrics: Value by key; zero-dimensional arrays and tensors count as numbers.

        Raises:
            ValueError: If ``metrics`` itself has a key ``"iteration"``.
        """
        if not self.is_main:
            return
        if "iteration" in metrics:
            raise ValueError('"iteration" is set from step; leave it out of the metrics')
        record = self._strict({"iteration": int(step), **metrics})
        self._append_line(METRICS, record)
        if self._forward is not None:
            numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "iteration"}
            self._forward(numbers, int(step))

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends one record to ``<name>.jsonl``; give it an ``"iteration"`` so that `cut_back` can undo it.

        Raises:
            TypeError: If the record holds something JSON has no form for.
        """
        if self.is_main:
            self._append_line(name, self._strict(record))

    def write_json(self, name: str, obj: Any) -> None:
        """Writes ``<name>.json`` whole or not at all: a reader never meets half a file.

        Raises:
            TypeError: If ``obj`` holds something JSON has no form for.
        """
        if self.is_main:
            text = json.dumps(self._strict(obj), indent=2, allow_nan=False) + "\n"
            _replace(self._path(name, ".json"), text)

    def cut_back(self, iteration: int) -> int:
        """Forgets what was recorded after a checkpoint, so that a resumed run does not repeat itself.

        Drops from every ``*.jsonl`` of the run the lines whose ``"iteration"`` is beyond ``iteration``, and lines that
        are not whole records (a killed run can leave a torn one). Lines without an iteration stay.

        Args:
            iteration: The last iteration to keep.

        Returns:
            The number of lines dropped.
        """
        if not self.is_main:
            return 0
        dropped = 0
        for path in sorted(self.run_dir.glob("*.jsonl")):
            # Split on "\n" alone: splitlines() would also break a line at characters such as U+2028.
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.split("\n") if line.strip()]
            kept = [line for line in lines if _is_kept(line, iteration)]
            dropped += len(lines) - len(kept)
            whole = "".join(line + "\n" for line in kept)
            if whole != text:
                _replace(path, whole)
        return dropped

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str = "") -> Iterator[ProgressBar]:
        """Shows how far a phase is; a bar in a terminal, an occasional line in a log file.

        Args:
            description: What is being done, for example ``"interact"``.
            total: Number of units in all; None when unknown.
            unit: What is counted, for example ``"dialogues"``.

        Yields:
            The bar; call its ``update(advance=1, note="reward 0.42")``.
        """
        if not self.is_main:
            yield Silent()
            return
        with shown(self.console, description, total, unit) as bar:
            yield bar

    def say(self, text: str, style: str | None = None) -> None:
        """Prints a line, literally, in an optional rich style (for example ``"bold"``)."""
        if self.is_main:
            self.console.print(literal(text), style=style, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Prints a warning, each distinct text once."""
        if text not in self._warned:
            self._warned.add(text)
            self.say(f"warning: {text}", style="yellow")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Prints a table: first column left-aligned, the others right-aligned, floats with three decimals, None as "-".

        Raises:
            ValueError: If a row does not have one cell for each column.
        """
        if not self.is_main:
            return
        table = Table(title=literal(title), title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(literal(column), justify="right" if index else "left")
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row of {title!r} has {len(row)} cells for {len(columns)} columns: {list(row)}")
            table.add_row(*(literal(_cell(value)) for value in row))
        self.console.print(table)

    def _append_line(self, name: str, record: Any) -> None:
        line = json.dumps(record, allow_nan=False) + "\n"
        # Opened anew each time: a line is on its way to disk when the call returns, whatever kills the run next.
        with self._path(name, ".jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def _path(self, name: str, suffix: str) -> Path:
        path = self.run_dir / (name.removesuffix(suffix) + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _strict(self, value: Any, key: str = "") -> Any:
        """The value in JSON's own types, with null for what JSON cannot hold (nan, inf)."""
        if hasattr(value, "tolist"):  # NumPy scalars and arrays, torch tensors
            return self._strict(value.tolist(), key)
        if isinstance(value, Mapping):
            return {str(k): self._strict(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._strict(v, key) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            self.warn(f"{key or 'a value'} is not a finite number; written as null")
            return None
        if isinstance(value, Path):
            return str(value)
        return value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_kept(line: str, iteration: int) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return False
    if not isinstance(record, dict):
        return False
    at = record.get("iteration")
    return not isinstance(at, int | float) or at <= iteration


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
