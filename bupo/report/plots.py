"""Figures of a run, drawn from ``metrics.jsonl``, ``summary.json`` and ``deals.json`` in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bupo.report.axes import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    Curve,
    Records,
    is_number,
    plot_balance,
    plot_deals,
    plot_policies,
    plot_series,
    plot_stage_payoffs,
)

DPI = 140


def write_plots(run_dir: Path) -> list[Path]:
    """Draws every figure the files of a run have data for.

    Args:
        run_dir: The run folder; ``metrics.jsonl``, ``summary.json`` and ``deals.json`` are each optional.

    Returns:
        The files written, all in ``<run_dir>/plots``.
    """
    run_dir = Path(run_dir)
    records = read_records(run_dir / "metrics.jsonl")
    summary, deals = (_read_json(run_dir / name) for name in ("summary.json", "deals.json"))
    figures = {
        "learning_curve": _learning_figure(records, summary) if records or summary.get("stages") else None,
        "diversity": _column(records, _DIVERSITY),
        "responsibilities": _column(records, _RESPONSIBILITIES),
        "updates": _column(records, _UPDATES),
        "deals": _deals_figure(deals) if deals.get("stages") else None,
    }
    folder = run_dir / "plots"
    written = []
    for name, figure in figures.items():
        if figure is not None:
            folder.mkdir(exist_ok=True)
            figure.savefig(folder / f"{name}.png", dpi=DPI, facecolor="white")
            written.append(folder / f"{name}.png")
    return written


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl`` that are whole records with an iteration; [] when there is no file.

    A run that is still writing, or was killed, may end in a torn line; it is left out.
    """
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and is_number(record.get("iteration")):
            records.append(record)
    return records


Panel = tuple[str, Callable[[Axes, Records], None]]


def _curves(ylabel: str, curves: Mapping[str, Curve]) -> Callable[[Axes, Records], None]:
    return lambda ax, records: plot_series(ax, records, curves, ylabel)


def _by_policy(prefix: str, ylabel: str, *, band: bool = False) -> Callable[[Axes, Records], None]:
    return lambda ax, records: plot_policies(ax, records, prefix, ylabel, band=band)


def _entropies(ax: Axes, records: Records) -> None:
    plot_series(ax, records, {"entropy/mixture": Curve("mixture", INK)}, "")
    plot_policies(ax, records, "entropy", "entropy (nats/token)")


_LEARNING: tuple[Panel, ...] = (
    (
        "Reward and payoff in training",
        _curves(
            "mean per dialogue",
            {"interact/payoff": Curve("payoff (own utility)", BLUE), "interact/reward": Curve("reward", ORANGE)},
        ),
    ),
    (
        "Agreement and validity in training",
        _curves(
            "share",
            {
                "interact/agreement_rate": Curve("agreement", GREEN),
                "interact/self_play_agreement": Curve("agreement, self-play", SKY),
                "interact/valid_message_rate": Curve("valid messages", GREY),
                "interact/irrational_deals": Curve("deals below reservation", PINK),
            },
        ),
    ),
    ("Dialogue length", _curves("rounds", {"interact/rounds": Curve("rounds per dialogue", INK)})),
)
_DIVERSITY: tuple[Panel, ...] = (
    (
        "Distance between sub-policies",
        _curves(
            "KL (nats/token)",
            {
                "evaluator/mean_pairwise_kl": Curve("mean pairwise KL", BLUE),
                "evaluator/mean_pairwise_kl_null": Curve("to itself, some updates ago (null)", GREY, "--"),
            },
        ),
    ),
    ("Disagreement", _curves("JSD (nats/token)", {"evaluator/jsd": Curve("Jensen-Shannon", GREEN)})),
    (
        "Effective number of policies",
        _curves("exp(JSD), policies", {"evaluator/effective_policies": Curve("effective", PINK)}),
    ),
    ("Entropy of each proposal and of the mixture", _entropies),
)
_RESPONSIBILITIES: tuple[Panel, ...] = (
    ("Responsibility for the executed tokens", _by_policy("responsibility", "mean share")),
    ("Coordinator weight", _by_policy("weight", "mean weight")),
    (
        "Relative advantage (difference credit, with its interval)",
        _by_policy("relative_advantage", "advantage", band=True),
    ),
)
_UPDATES: tuple[Panel, ...] = (
    (
        "Distance moved",
        _curves(
            "KL (nats/token)",
            {
                "ppo/kl_reference": Curve("to the SFT policy", BLUE),
                "ppo/kl_old": Curve("to the policy before the update", ORANGE),
            },
        ),
    ),
    (
        "Importance ratio",
        _curves(
            "share, |ratio - 1|",
            {
                "ppo/clip_fraction": Curve("clipped tokens (share)", GREEN),
                "ppo/ratio_deviation": Curve("mean |ratio - 1|", PINK),
            },
        ),
    ),
    (
        "Reward terms",
        _curves(
            "mean per dialogue",
            {
                f"reward/{term}": Curve(term, colour)
                for term, colour in zip(("economic", "relationship", "efficiency", "creativity"), CYCLE, strict=False)
            },
        ),
    ),
    (
        "Time",
        _curves(
            "seconds",
            {
                f"seconds/{phase}": Curve(phase, colour)
                for phase, colour in zip(("interact", "update", "balance"), CYCLE, strict=False)
            },
        ),
    ),
)


def _filled(records: Records, panels: Iterable[Panel]) -> list[Panel]:
    """The panels that would show at least one curve."""
    filled = []
    for title, draw in panels:
        scratch = Figure().subplots()
        draw(scratch, records)
        if scratch.lines:
            filled.append((title, draw))
    return filled


def _draw_column(axes: Sequence[Axes], records: Records, panels: Sequence[Panel]) -> None:
    for ax, (title, draw) in zip(axes, panels, strict=True):
        draw(ax, records)
        ax.set_title(title, loc="left", fontsize=10, color=INK)
        if ax is not axes[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)


def _column(records: Records, panels: Iterable[Panel]) -> Figure | None:
    filled = _filled(records, panels)
    if not filled:
        return None
    figure = Figure(figsize=(8.5, 0.6 + 2.1 * len(filled)), layout="constrained")
    axes = list(figure.subplots(len(filled), 1, sharex=True, squeeze=False)[:, 0])
    _draw_column(axes, records, filled)
    for ax in axes:
        plot_balance(ax, records, label=ax is axes[0])
    if axes[0].texts:  # lift the title above the names
        axes[0].set_title(filled[0][0], loc="left", fontsize=10, color=INK, pad=24)
    return figure


def _learning_figure(records: Records, summary: Mapping[str, Any]) -> Figure | None:
    filled = _filled(records, _LEARNING)
    stages = bool(summary.get("stages"))
    if not filled and not stages:
        return None
    figure = Figure(
        figsize=(7.5 * bool(filled) + 7.0 * stages, max(4.2, 0.6 + 2.1 * len(filled))), layout="constrained"
    )
    parts = iter(np.atleast_1d(np.array(figure.subfigures(1, bool(filled) + stages))))
    if filled:
        axes = list(next(parts).subplots(len(filled), 1, sharex=True, squeeze=False)[:, 0])
        _draw_column(axes, records, filled)
    if stages:
        ax = next(parts).subplots()
        plot_stage_payoffs(ax, summary)
        ax.set_title("Evaluation on held-out scenarios (95% intervals)", loc="left", fontsize=10, color=INK)
    return figure


def _deals_figure(deals: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    ax = figure.subplots()
    plot_deals(ax, deals)
    ax.set_title("Deals on held-out scenarios (large markers: means)", loc="left", fontsize=10, color=INK)
    return figure


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
