"""Milliseconds of a decode step for 1 to 16 sub-policies, and a plot.

    python experiments/benchmarks/scaling.py --base smollm2 --batch 8 --branch-layers 10 --plot docs/scaling.png

All pools are sub-stacks of one of sixteen policies on one base and are timed in turn, with and without the sampling
shortcut. The dashed line is what as many passes of one policy would cost.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from common import interleaved, parser, pool_of, prepare, report
from lockstep import ours
from matplotlib.figure import Figure
from transformers.utils import logging

from bupo.policies.lockstep import Lockstep
from bupo.report.axes import BLUE, GREY, ORANGE

SIZES = (1, 2, 4, 8, 12, 16)


def draw(path: Path, title: str, plain: dict[int, float], short: dict[int, float]) -> None:
    """Writes the plot."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    sizes = list(plain)
    ax.plot(sizes, [plain[k] for k in sizes], "o-", color=BLUE, label="lockstep")
    ax.plot(sizes, [short[k] for k in sizes], "s-", color=ORANGE, label="lockstep, sampling shortcut")
    ax.plot(sizes, [plain[sizes[0]] * k for k in sizes], "--", color=GREY, label="one policy, K times")
    ax.set(
        xlabel="sub-policies K",
        ylabel="ms per decode step",
        title=title,
        xticks=sizes,
        ylim=(0, 1.6 * plain[sizes[-1]]),
    )
    ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures, prints and draws."""
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--plot", type=Path, default=None, help="where to write the plot")
    options_parser.set_defaults(policies=SIZES[-1])
    options: argparse.Namespace = options_parser.parse_args()
    prepare(options)
    logging.set_verbosity_error()
    pool = pool_of(options, options.policies)
    lockstep = Lockstep(pool)
    generator = torch.Generator().manual_seed(1)
    vocabulary = pool.base.model.config.vocab_size
    ids_BT = torch.randint(5, vocabulary, (options.batch, options.context + 1), generator=generator).to(options.device)
    sizes = [size for size in SIZES if size <= options.policies]
    steps = {
        (size, shortcut): ours(lockstep, lockstep.stacks(pool.names[:size]), ids_BT, shortcut=shortcut)
        for size in sizes
        for shortcut in (False, True)
    }
    times = interleaved(
        {f"{size} {shortcut}": step for (size, shortcut), step in steps.items()}, options.repeats, options.device
    )
    plain, short = ({size: 1e3 * times[f"{size} {how}"] for size in sizes} for how in (False, True))
    slopes = {b: (plain[b] - plain[a]) / (b - a) for a, b in pairwise(sizes)}
    rows = {f"k{size}_ms": (plain[size], f"{plain[size] / plain[1]:.2f} x one policy") for size in sizes}
    rows |= {f"k{size}_shortcut_ms": (short[size], f"{short[size] / plain[size]:.2f} x without") for size in sizes}
    rows |= {f"branch_at_{size}_ms": (slope, "for each policy more") for size, slope in slopes.items()}
    title = f"decode step, {options.base}, B = {options.batch}, top {options.branch_layers}"
    report(title, rows, {key: str(value) for key, value in vars(options).items()})
    if options.plot is not None:
        draw(options.plot, title, plain, short)


if __name__ == "__main__":
    main()
