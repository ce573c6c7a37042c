"""Configuration: frozen dataclass trees from YAML files and dotted command line options.

The module knows no component. A component keeps its own frozen, keyword-only config dataclass beside it and checks
its values in ``__post_init__`` with the rules below; a root dataclass nests those sections. `parse` fills the tree
(defaults < ``--config`` files in order < command line) and reports every mistake at once, as one `ConfigError`.

jsonargparse supplies the type parsing and the help text. Reading files and collecting errors is done here, because a
parser that stops at the first mistake would cost the user one run for each of them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import math
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from jsonargparse import ArgumentError, ArgumentParser

Config = TypeVar("Config")


# --- errors and rules ---------------------------------------------------------------------------------------------


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


# --- the shape of a config class ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    path: str
    hint: Any
    default: Any
    doc: str


@dataclass(frozen=True, kw_only=True)
class _Section:
    path: str
    cls: type
    doc: str
    default: Any
    leaves: dict[str, _Leaf]
    sections: dict[str, _Section]

    def all_sections(self) -> Iterable[_Section]:
        yield self
        for section in self.sections.values():
            yield from section.all_sections()


_RESERVED = ("config", "help", "print_config")


def _section(cls: type, path: str, instance: object) -> _Section:
    """Describe a config class; `instance` holds the defaults where its owner sets them, else it is MISSING."""
    hints = get_type_hints(cls)
    docs = _field_docs(cls)
    leaves: dict[str, _Leaf] = {}
    sections: dict[str, _Section] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, child = hints[field.name], _join(path, field.name)
        if child in _RESERVED:
            raise TypeError(f"{cls.__name__}.{field.name}: the names {', '.join(_RESERVED)} are taken by the parser")
        if instance is not MISSING:
            default = getattr(instance, field.name)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        else:
            default = field.default
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections[field.name] = _section(hint, child, default)
        else:
            leaves[field.name] = _Leaf(path=child, hint=hint, default=default, doc=docs.get(field.name, ""))
    return _Section(path=path, cls=cls, doc=_summary(cls), default=instance, leaves=leaves, sections=sections)


def _field_docs(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for parameter in docstring_parser.parse(base.__doc__ or "").params:
            docs[parameter.arg_name] = " ".join((parameter.description or "").split())
    return docs


def _summary(cls: type) -> str:
    # A dataclass without a docstring is given its signature as one, which would say nothing here.
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else docstring_parser.parse(text).short_description or ""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- values -----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


# PyYAML follows YAML 1.1, where `1e-5` is a string. Both directions must agree, or dumped strings would turn numbers.
for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


@dataclass(frozen=True, kw_only=True)
class _Given:
    value: Any
    origin: str
    from_argv: bool


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _dict_hint(hint: Any) -> Any:
    return next((member for member in _members(hint) if member is dict or get_origin(member) is dict), None)


def _with_entry(entries: Mapping[str, Any], hint: Any, key: str, value: Any) -> dict[str, Any]:
    """Copy a dict option with one entry set; dots in `key` go deeper as long as the entries are dicts themselves."""
    head, _, rest = key.partition(".")
    inner = _dict_hint(get_args(hint)[1]) if get_args(hint) else None
    if rest and inner is not None:
        return {**entries, head: _with_entry(entries.get(head, {}), inner, rest, value)}
    return {**entries, key: value}


def _coerce(hint: Any, given: _Given) -> Any:
    """Turn what was given into the type of a field, or raise ValueError with what was expected."""
    value, members = given.value, _members(hint)
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
    keys_must_be_str = (get_args(_dict_hint(hint)) or (None,))[0] is str
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
    if len(_members(hint)) > 1:
        return " or ".join(_expected(member) for member in _members(hint))
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
        if _dict_hint(member) is not None:
            return "; write a mapping, such as {key: value}"
        if member in (str, Path) and not isinstance(value, (list, dict)):
            return "; quote it to make it a string"
    return ""


# --- reading ------------------------------------------------------------------------------------------------------


class _Reader:
    """Collects values and problems for one tree, from files first and then from the command line."""

    def __init__(self, root: _Section) -> None:
        self.root = root
        self.sections = {section.path: section for section in root.all_sections()}
        self.leaves = {leaf.path: leaf for section in self.sections.values() for leaf in section.leaves.values()}
        self.given: dict[str, _Given] = {}
        self.problems: list[str] = []

    def read_argv(self, argv: Sequence[str]) -> None:
        """Read the files named by --config in order, then apply the other options over them."""
        tokens, options = list(argv), []
        while tokens:
            token = tokens.pop(0)
            if token == "--print_config":
                continue
            name, equals, value = token.removeprefix("--").partition("=")
            if token in ("--", "-") or not token.startswith("-"):
                self.problems.append(
                    f"{token!r} belongs to no option; write --name value, and quote a value with spaces: "
                    "--name '[1, 2]'"
                )
                continue
            if not equals:
                value = self._take_value(name, tokens)
            if not token.startswith("--"):
                self._unknown(token, f"command line; options begin with two dashes: --{token.lstrip('-')}")
            elif value is None and (name == "config" or name in self.leaves):
                self.problems.append(f"--{name} needs a value: --{name} VALUE")
            elif name == "config":
                self._read_file(str(value))
            else:
                options.append((name, value))
        for name, value in options:
            self._assign(name, _Given(value=value, origin="command line", from_argv=True))

    def _take_value(self, name: str, tokens: list[str]) -> Any:
        if name in self.leaves and bool in _members(self.leaves[name].hint):
            # A bare flag means true, so only a word that can be its value is taken from what follows.
            follows = tokens[0].lower() if tokens else ""
            return tokens.pop(0) if follows in ("true", "false", "yes", "no", "null") else True
        # One dash is no option here: it may begin a negative number.
        return tokens.pop(0) if tokens and not tokens[0].startswith("--") else None

    def _read_file(self, path: str) -> None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            self.problems.append(f"config: cannot read {path}: {error.strerror}; name an existing YAML file")
            return
        except UnicodeDecodeError as error:
            self.problems.append(f"config: {path} is not UTF-8 text: {error.reason} at byte {error.start}")
            return
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is not None:
                self._read_node(loader, node, self.root, path)
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}, line {mark.line + 1}" if mark else path
            self.problems.append(f"config: {where} is not valid YAML: {getattr(error, 'problem', None) or error}")

    def _read_node(self, loader: _Loader, node: yaml.Node, section: _Section, file: str) -> None:
        if node.tag == "tag:yaml.org,2002:null":
            return  # A section whose lines are all commented out.
        if not isinstance(node, yaml.MappingNode):
            where = f"{file}, line {node.start_mark.line + 1}"
            names = ", ".join([*section.sections, *section.leaves])
            what = f"{section.path} is a section and" if section.path else "config: the file"
            self.problems.append(f"{what} must be a mapping with keys from {names} ({where})")
            return
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and name != "<<":
                where = f"{file}, line {key.start_mark.line + 1}"
                self.problems.append(f"{_join(section.path, name)} is given twice ({where}); keep one")
            seen.add(name)
        loader.flatten_mapping(node)
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(loader.construct_object(key, deep=True))
            path, origin = _join(section.path, name), f"{file}, line {key.start_mark.line + 1}"
            if path in self.sections:
                self._read_node(loader, value, self.sections[path], file)
            else:
                content = loader.construct_object(value, deep=True)
                self._assign(path, _Given(value=content, origin=origin, from_argv=False))

    def _assign(self, path: str, given: _Given) -> None:
        owner = next((leaf for leaf in self.leaves.values() if path.startswith(f"{leaf.path}.")), None)
        if path in self.leaves:
            self.given[path] = given
        elif path in self.sections:
            names = [*self.sections[path].leaves, *self.sections[path].sections]
            self.problems.append(f"{path} is a section ({given.origin}); set its options: {path}.{names[0]}, ...")
        elif owner is not None and (hint := _dict_hint(owner.hint)) is not None:
            try:
                before = _coerce(owner.hint, self.given[owner.path]) if owner.path in self.given else owner.default
            except ValueError:
                return  # What was given first stays, and is reported when the section is built.
            entries = before if isinstance(before, dict) else {}
            merged = _with_entry(entries, hint, path.removeprefix(f"{owner.path}."), given.value)
            self.given[owner.path] = dataclasses.replace(given, value=merged)
        else:
            self._unknown(path, given.origin)

    def _unknown(self, path: str, origin: str) -> None:
        known = [name for name in [*self.leaves, *self.sections] if name]
        last = path.rpartition(".")[2]
        # The right name in the wrong (or no) section is the commonest slip; then a misspelling.
        close = [name for name in known if name.rpartition(".")[2] == last]
        close = close or difflib.get_close_matches(path.lstrip("-"), known, n=1)
        parent = path
        while parent and parent not in self.sections:
            parent = parent.rpartition(".")[0]
        section = self.sections[parent]
        hint = f"; did you mean {close[0]}?" if close else "."
        allowed = ", ".join([*section.sections, *section.leaves])
        place = f"in {section.path}" if section.path else "at the top level"
        self.problems.append(f"{path} is not an option ({origin}){hint} Allowed {place}: {allowed}")

    def build(self, section: _Section) -> Any:
        """Construct a section bottom up; None when something in it is wrong (the problems say what)."""
        values: dict[str, Any] = {}
        wrong: set[str] = set()
        for name, child in section.sections.items():
            values[name] = self.build(child)
            if values[name] is None:
                values[name] = child.default
                wrong.add(name)
        for name, leaf in section.leaves.items():
            values[name] = leaf.default
            try:
                if leaf.path in self.given:
                    values[name] = _coerce(leaf.hint, self.given[leaf.path])
                elif leaf.default is MISSING:
                    raise ValueError(f"is required: --{leaf.path} VALUE, or a line of a config file")
            except ValueError as error:
                wrong.add(name)
                self.problems.append(self._located(f"{leaf.path} {error}"))
        if any(value is MISSING for value in values.values()):
            return None
        try:
            instance = section.cls(**values)
        except ConfigError as error:
            found = error.problems
        except ValueError as error:
            found = (str(error),)
        else:
            return None if wrong else instance
        if wrong:
            # Defaults stood in for what is wrong, so only what is said of one sound option alone can be believed.
            sound = section.leaves.keys() - wrong
            found = [text for text in found if text.split(" ", 1)[0] in sound and wrong.isdisjoint(_words(text))]
        self.problems.extend(self._located(self._qualified(text, section)) for text in found)
        return None

    def _qualified(self, problem: str, section: _Section) -> str:
        first = next(iter(_words(problem)), "")
        if first in section.leaves or first in section.sections or not section.path:
            return _join(section.path, problem)
        return f"{section.path}: {problem}"

    def _located(self, problem: str) -> str:
        given = self.given.get(problem.split(" ", 1)[0])
        return f"{problem} ({given.origin})" if given else problem


# --- the public entry points --------------------------------------------------------------------------------------


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
    root = _section(cls, "", MISSING)
    if "--help" in argv or "-h" in argv:
        _print_help(root, prog=prog, description=description)
    reader = _Reader(root)
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
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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


def _print_help(root: _Section, *, prog: str | None, description: str | None) -> NoReturn:
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
