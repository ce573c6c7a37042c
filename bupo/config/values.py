"""Turning what YAML or the command line gave into a field's type, with errors that say what was expected."""

from __future__ import annotations

import copy
import difflib
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser


class Loader(yaml.SafeLoader):
    """Reads YAML with numbers as people write them."""


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back."""


# PyYAML follows YAML 1.1, where `1e-5` is a string. Both directions must agree, or dumped strings would turn numbers.
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value and where it came from."""

    value: Any
    origin: str
    from_argv: bool


def members_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def dict_hint(hint: Any) -> Any:
    """The dict among the alternatives, None if there is none."""
    return next((member for member in members_of(hint) if member is dict or get_origin(member) is dict), None)


def with_entry(entries: Mapping[str, Any], hint: Any, key: str, value: Any) -> dict[str, Any]:
    """Copy a dict option with one entry set; dots in `key` go deeper as long as the entries are dicts themselves."""
    head, _, rest = key.partition(".")
    inner = dict_hint(get_args(hint)[1]) if get_args(hint) else None
    if rest and inner is not None:
        return {**entries, head: with_entry(entries.get(head, {}), inner, rest, value)}
    return {**entries, key: value}


def coerce(hint: Any, given: Given) -> Any:
    """Turn what was given into the type of a field, or raise ValueError with what was expected."""
    value, members = given.value, members_of(hint)
    if value is None:
        if Any in members or types.NoneType in members:
            return None
        raise ValueError(f"must be {_expected(hint)}, got nothing (null)")
    if isinstance(value, str) and not given.from_argv and str in members:
        return value  # YAML has already told strings from numbers and null; what was quoted stays a string.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        result = parser.parse_object({"value": copy.deepcopy(value)}).value
        # jsonargparse reads "null" as None for every type, as an option without a default has to start somewhere.
        fits = result is not None or types.NoneType in members
    except ArgumentError:
        result, fits = None, False
    if not fits:
        kind = "" if isinstance(value, str) else f" ({type(value).__name__})"
        raise ValueError(f"must be {_expected(hint)}, got {value!r}{kind}{_mend(members, value)}")
    keys_must_be_str = (get_args(dict_hint(hint)) or (None,))[0] is str
    if isinstance(result, dict) and keys_must_be_str and not all(isinstance(key, str) for key in result):
        raise ValueError(f"must be {_expected(hint)}, got {value!r}; quote the keys that look like numbers")
    return result


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(item) for item in get_args(hint))
    if hint is types.NoneType:
        return "null"
    if isinstance(hint, type) and get_origin(hint) is None:
        return hint.__name__
    if len(members_of(hint)) > 1:
        return " or ".join(_expected(member) for member in members_of(hint))
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def _mend(members: tuple[Any, ...], value: Any) -> str:
    for member in members:
        if get_origin(member) is Literal:
            close = difflib.get_close_matches(str(value), [str(item) for item in get_args(member)], n=1)
            return f"; did you mean {close[0]!r}?" if close else ""
        if member is bool:
            return "; write true or false"
        if get_origin(member) in (list, tuple, Sequence) or member in (list, tuple):
            return "; write a list, such as [a, b]"
        if dict_hint(member) is not None:
            return "; write a mapping, such as {key: value}"
        if member in (str, Path) and not isinstance(value, (list, dict)):
            return "; quote it to make it a string"
    return ""
