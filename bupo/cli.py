"""The `bupo` command, and what recipes call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bupo.config import ConfigError, parse_or_exit
from bupo.policies.bases import MissingBaseError
from bupo.policies.chat import ChatTemplateError
from bupo.report.plots import write_plots
from bupo.run import Config
from bupo.tracking import RunFolderError
from bupo.train import train

USAGE = """usage: bupo COMMAND ...

commands:
  train [options]   train negotiators (bupo train --help explains every option)
  plots RUN         draw the plots of a run folder again
"""


def run_negotiation(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parses options, trains, draws the plots; also after Ctrl-C.

    Returns:
        Exit status: 0, 1 for a run that could not start, 130 after Ctrl-C.
    """
    config = parse_or_exit(
        Config, argv, prog=prog, description="Train K LoRA sub-policies to negotiate by self-play through a mixture."
    )
    try:
        folder = train(config)
    except KeyboardInterrupt:
        write_plots(Path(config.output_dir))
        return 130
    except (RunFolderError, MissingBaseError, ChatTemplateError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plots = write_plots(folder)
    print(f"run folder: {folder} ({len(plots)} plots in {folder / 'plots'})")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:
        return run_negotiation(arguments[1:], prog="bupo train")
    if arguments[:1] == ["plots"] and len(arguments) == 2:
        folder = Path(arguments[1])
        if not (folder / "metrics.jsonl").is_file():
            print(f"error: {folder} is no run folder: it has no metrics.jsonl", file=sys.stderr)
            return 1
        for path in write_plots(folder):
            print(path)
        return 0
    print(USAGE, end="")
    return 0 if arguments[:1] in (["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main())
