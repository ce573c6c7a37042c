"""Configuration: frozen dataclass trees from YAML files and dotted command line options.

The module knows no component. A component keeps its own frozen, keyword-only config dataclass beside it and checks
its values in ``__post_init__`` with the rules below; a root dataclass nests those sections. `parse` fills the tree
(defaults < ``--config`` files in order < command line) and reports every mistake at once, as one `ConfigError`.

jsonargparse supplies the type parsing and the help text. Reading files and collecting errors is done here, because a
parser that stops at the first mistake would cost the user one run for each of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentParser

from bupo.config.reader import Reader
from bupo.config.rules import ConfigError, at_least, in_range, one_of, positive, raise_problems
from bupo.config.schema import Section, describe
from bupo.config.values import Dumper

__all__ = [
    "ConfigError",
    "at_least",
    "dump",
    "in_range",
    "load",
    "one_of",
    "parse",
    "parse_or_exit",
    "positive",
    "raise_problems",
    "to_dict",
]

Config = TypeVar("Config")


def parse(
    cls: type[Config], argv: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = None
) -> Config:
    """Build a config from defaults, YAML files and dotted options, later ones winning.

    ``--config FILE`` may be repeated; ``--pool.size 4`` and ``--pool.size=4`` set one field, ``--resume`` alone a
    bool, ``--weights.deal 0.5`` one entry of a dict. ``--print_config`` prints the merged config as YAML and
    ``--help`` explains every option; both exit with code 0.

    Args:
        cls: the root dataclass; fields that are dataclasses are its sections.
        argv: the arguments without the program's name; None takes the process's own.
        prog: the program's name in the help text.
        description: what the help text says first; the summary of the docstring of `cls` by default.

    Raises:
        ConfigError: with every unknown name, wrong type and impossible value found.
        TypeError: when a root field has one of the parser's own names.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    root = describe(cls, "", MISSING)
    if "--help" in argv or "-h" in argv:
        _print_help(root, prog=prog, description=description)
    reader = Reader(root)
    reader.read_argv(argv)
    config = reader.build(root)
    raise_problems(reader.problems)
    if "--print_config" in argv:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def parse_or_exit(
    cls: type[Config], argv: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = None
) -> Config:
    """Like `parse`, for a command line entry: problems go to stderr and the process exits with code 2."""
    try:
        return parse(cls, argv, prog=prog, description=description)
    except ConfigError as error:
        print(f"{error}\nRun with --help for every option.", file=sys.stderr)
        raise SystemExit(2) from None


def load(cls: type[Config], path: str | Path) -> Config:
    """Read a config from one YAML file.

    Raises:
        ConfigError: with everything that is wrong with the file.
    """
    return parse(cls, [f"--config={path}"])


def dump(config: object) -> str:
    """Write a config as YAML that `load` reads back as an equal config."""
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def to_dict(config: Any) -> dict[str, Any]:
    """Turn a config into plain dicts, lists and scalars."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _print_help(root: Section, *, prog: str | None, description: str | None) -> NoReturn:
    parser = ArgumentParser(
        prog=prog, description=description or root.doc, usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]"
    )
    own: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; repeatable, later files win", **own)
    parser.add_argument("--print_config", action="store_true", help="print the merged options as YAML and exit", **own)
    for section in root.all_sections():
        group = parser.add_argument_group(section.path, section.doc) if section.path else parser
        for leaf in section.leaves.values():
            kwargs = {"required": True} if leaf.default is MISSING else {"default": leaf.default}
            action: Any = group.add_argument(f"--{leaf.path}", type=leaf.hint, help=leaf.doc or None, **kwargs)
            action.option_strings = [f"--{leaf.path}"]  # jsonargparse adds an appending `--name+`, not offered here.
    parser.print_help()
    raise SystemExit(0)
