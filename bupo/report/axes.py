"""What a run measured, drawn on one matplotlib ``ax``: curves, stage bars, deal clouds.

Every ``plot_*`` function takes data and an ``ax``, draws what the data holds and skips what it lacks, so the same
functions serve notebooks and comparisons of runs. Nothing here uses pyplot or touches global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

# Okabe & Ito, Color Universal Design (2008): told apart with any common colour blindness, and in grey print.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, INK, GREY = "#56B4E9", "#E69F00", "#222222", "#8A8A8A"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER)  # INK is kept for mixtures, means and frontiers
MARKERS = "osD^vPX*"
STAGES = {"sft": AMBER, "initial": SKY, "final": BLUE}
STAGE_LABELS = {"sft": "SFT policy", "initial": "initial pool", "final": "final pool"}
MOST_LABELS = 8  # more balance decisions than this are marked without their names

Records = Sequence[Mapping[str, Any]]


class Curve(NamedTuple):
    """How one metric is drawn: its legend label, colour and line style."""

    label: str
    colour: str
    style: str = "-"


def series(records: Records, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The known points of one metric.

    Args:
        records: Lines of ``metrics.jsonl``.
        key: The metric.

    Returns:
        Iterations and values, both [N]; lines without a finite number under ``key`` are left out.
    """
    points = [(r["iteration"], r[key]) for r in records if is_number(r.get("iteration")) and is_number(r.get(key))]
    return np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points], dtype=float)


def policies(records: Records, prefix: str) -> list[str]:
    """Names of the sub-policies that ever had a value under ``<prefix>/<name>``, sorted."""
    return sorted({key.removeprefix(f"{prefix}/") for r in records for key in r if key.startswith(f"{prefix}/p")})


def plot_series(ax: Axes, records: Records, curves: Mapping[str, Curve], ylabel: str) -> None:
    """Draws one line a metric over the iterations.

    Args:
        ax: Where to draw.
        records: Lines of ``metrics.jsonl``.
        curves: How to draw each metric, by its key.
        ylabel: Label of the axis, with its unit.
    """
    for key, (label, colour, style) in curves.items():
        x, y = series(records, key)
        if len(x):
            marker = "o" if style == "-" or len(x) == 1 else ""  # markers would hide the dashes
            ax.plot(x, y, style, color=colour, label=label, marker=marker, markersize=_marker_size(x), linewidth=1.6)
    _dress(ax, ylabel)


def plot_policies(ax: Axes, records: Records, prefix: str, ylabel: str, *, band: bool = False) -> None:
    """Draws one metric of every sub-policy over the iterations; a policy keeps its colour in every plot.

    Args:
        ax: Where to draw.
        records: Lines of ``metrics.jsonl``.
        prefix: The metric, as in ``<prefix>/p00``.
        ylabel: Label of the axis, with its unit.
        band: Whether to shade from ``<prefix>_low/p00`` to ``<prefix>_high/p00``.
    """
    curves = {name: series(records, f"{prefix}/{name}") for name in policies(records, prefix)}
    measured = np.unique(np.concatenate([x for x, _ in curves.values()])) if curves else np.empty(0)
    for name, (x, y) in curves.items():
        if not len(x):
            continue
        colour, marker = _identity(name)
        # A line breaks where others were measured and this policy was not; a metric taken every few iterations, for
        # all of them, stays connected.
        grid = measured[(measured >= x.min()) & (measured <= x.max())]
        line = np.full(len(grid), np.nan)
        line[np.searchsorted(grid, x)] = y
        ax.plot(grid, line, color=colour, marker=marker, markersize=_marker_size(x), linewidth=1.6, label=name)
        if band:
            _shade(ax, records, f"{prefix}_low/{name}", f"{prefix}_high/{name}", colour)
    if band and ax.lines:
        ax.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    _dress(ax, ylabel)


def plot_balance(ax: Axes, records: Records, *, label: bool = False) -> None:
    """Marks the iterations after which sub-policies were culled (dashed) or injected (dotted).

    Args:
        ax: Where to draw.
        records: Lines of ``metrics.jsonl`` with ``balance/culled`` and ``balance/injected`` (a name, names or null).
        label: Whether to write the names above the axes, where there is room for them.
    """
    changes = [(r["iteration"], _names(r.get("balance/culled")), _names(r.get("balance/injected"))) for r in records]
    changes = [change for change in changes if change[1] or change[2]]
    for iteration, culled, injected in changes:
        for names, style, colour in ((culled, "--", ORANGE), (injected, ":", GREEN)):
            if names:
                ax.axvline(iteration, linestyle=style, color=colour, linewidth=1.3, zorder=1)
        if label and len(changes) <= MOST_LABELS:
            told = [
                f"{verb} {' '.join(names)}" for verb, names in (("culled", culled), ("injected", injected)) if names
            ]
            ax.annotate(
                "\n".join(told),
                xy=(iteration, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
            )


def plot_stage_payoffs(ax: Axes, summary: Mapping[str, Any]) -> None:
    """Bars of the mean payoff by stage and opponent, with 95% intervals.

    A short line across a group marks what a scripted linear player gets there (dotted) and the ceiling (solid).

    Args:
        ax: Where to draw.
        summary: Contents of ``summary.json``.
    """
    stages = _ordered(summary.get("stages", {}))
    opponents = list(dict.fromkeys(o for _, stage in stages for o in stage.get("per_opponent", {})))
    groups = ["all", *opponents]
    width = 0.8 / max(len(stages), 1)
    for index, (name, stage) in enumerate(stages):
        entries = [_payoff(stage, group) for group in groups]
        known = [(g, e) for g, e in enumerate(entries) if e is not None]
        if not known:
            continue
        x = np.array([g + (index - (len(stages) - 1) / 2) * width for g, _ in known])
        mean = np.array([e[0] for _, e in known])
        colour = STAGES.get(name, CYCLE[(index + 2) % len(CYCLE)])
        ax.bar(x, mean, 0.92 * width, color=colour, label=STAGE_LABELS.get(name, name))
        low, high = (np.array([e[i] for _, e in known]) for i in (1, 2))
        ax.errorbar(x, mean, [mean - low, high - mean], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    for source, style, label in (("scripted_linear", "dotted", "scripted Linear"), ("ceiling", "solid", "ceiling")):
        marks = [(g, e[0]) for g, group in enumerate(groups) if (e := _payoff(summary.get(source), group)) is not None]
        if marks:
            x, y = np.array(marks).T
            ax.hlines(y, x - 0.45, x + 0.45, colors=INK, linestyles=style, linewidth=1.4, label=label)  # type: ignore[arg-type]
    ax.set_xticks(range(len(groups)), [g.replace("_", " ") for g in groups], rotation=20, ha="right")
    _dress(ax, "payoff (own utility, 0-1)", over_iterations=False)
    ax.axvline(0.5, color="#CCCCCC", linewidth=0.8)
    ax.set_xlabel("opponent")


def plot_deals(ax: Axes, deals: Mapping[str, Any]) -> None:
    """Scatters the deals of each stage in surplus space, with the mean Pareto frontier.

    A surplus share is 0 at a party's reservation value and 1 at its ideal; left of or below 0 the deal is irrational.

    Args:
        ax: Where to draw.
        deals: Contents of ``deals.json``; points are (own surplus, opponent surplus).
    """
    drawn = [(name, _points(points)) for name, points in _ordered(deals.get("stages", {}))]
    for index, (name, points) in enumerate(drawn):
        if len(points):
            colour = STAGES.get(name, CYCLE[(index + 2) % len(CYCLE)])
            label = f"{STAGE_LABELS.get(name, name)} (n={len(points)})"
            marker = MARKERS[index % len(MARKERS)]
            ax.scatter(*points.T, s=14, color=colour, marker=marker, alpha=0.35, linewidths=0, label=label)
            # Means last, on top of every cloud: the shift between stages is what the figure is about.
            ax.scatter(
                *points.mean(axis=0), s=110, color=colour, marker=marker, edgecolors=INK, linewidths=1.3, zorder=5
            )
    frontier = _points(deals.get("frontier"))
    if len(frontier):
        frontier = frontier[np.argsort(frontier[:, 0], kind="stable")]
        ax.plot(*frontier.T, color=INK, linewidth=1.4, label="mean Pareto frontier")
    every = np.concatenate([p for _, p in drawn] + [frontier, [[0.0, 0.0], [1.0, 1.0]]])
    low, high = np.minimum(every.min(axis=0), -0.05) - 0.03, np.maximum(every.max(axis=0), 1.0) + 0.03
    ax.axvspan(low[0], 0, color="#F0F0F0", zorder=0, linewidth=0)
    ax.axhspan(low[1], 0, color="#F0F0F0", zorder=0, linewidth=0, label="below a reservation value")
    _dress(ax, "opponent surplus (0 = reservation, 1 = ideal)", over_iterations=False)
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel="own surplus (0 = reservation, 1 = ideal)")
    ax.set_aspect("equal")


def _dress(ax: Axes, ylabel: str, *, over_iterations: bool = True) -> None:
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, borderaxespad=0)
    if over_iterations:
        ax.set_xlabel("iteration")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _shade(ax: Axes, records: Records, low_key: str, high_key: str, colour: str) -> None:
    both = [r for r in records if is_number(r.get(low_key)) and is_number(r.get(high_key))]
    x, low = series(both, low_key)
    _, high = series(both, high_key)
    if len(x) > 1:
        ax.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
    elif len(x):  # a band over one point has no area
        ax.vlines(x, low, high, color=colour, linewidth=1)


def _payoff(entry: Any, group: str) -> tuple[float, float, float] | None:
    """Mean payoff and its limits (the mean itself where unknown) of a stage against an opponent, or against all."""
    if isinstance(entry, Mapping) and group != "all":
        entry = entry.get("per_opponent", {}).get(group)
    if isinstance(entry, Mapping):
        entry = entry.get("payoff", entry)
    if not isinstance(entry, Mapping) or not is_number(entry.get("mean")):
        return None
    mean = float(entry["mean"])
    low, high = (float(x) if is_number(x) else mean for x in entry.get("ci95") or (None, None))
    return mean, low, high


def _ordered(stages: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = [name for name in STAGES if name in stages]
    return [(name, stages[name]) for name in [*known, *(n for n in stages if n not in STAGES)] if stages[name]]


def _points(points: Any) -> NDArray[np.float64]:
    return np.array(points or [], dtype=float).reshape(-1, 2)


def _identity(name: str) -> tuple[str, str]:
    """Colour and marker of a sub-policy: by its number, so that it looks the same in every figure and run."""
    number = int(name[1:]) if name[1:].isdigit() else sum(map(ord, name))
    return CYCLE[number % len(CYCLE)], MARKERS[(number // len(CYCLE)) % len(MARKERS)]


def _names(value: Any) -> list[str]:
    return value.replace(",", " ").split() if isinstance(value, str) else [str(name) for name in value or []]


def _marker_size(x: NDArray[np.float64]) -> float:
    return 3.5 if len(x) <= 60 else 1.5


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a metric holds a finite number (true and false do not count)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
