"""Reads files and options into a tree, collecting every problem on the way."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from bupo.config.rules import ConfigError
from bupo.config.schema import Section, join, words
from bupo.config.values import Given, Loader, coerce, dict_hint, members_of, with_entry


class Reader:
    """Collects values and problems for one tree, from files first and then from the command line."""

    def __init__(self, root: Section) -> None:
        """Start with nothing given."""
        self.root = root
        self.sections = {section.path: section for section in root.all_sections()}
        self.leaves = {leaf.path: leaf for section in self.sections.values() for leaf in section.leaves.values()}
        self.given: dict[str, Given] = {}
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
            self._assign(name, Given(value=value, origin="command line", from_argv=True))

    def _take_value(self, name: str, tokens: list[str]) -> Any:
        if name in self.leaves and bool in members_of(self.leaves[name].hint):
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
            loader = Loader(text)
            node = loader.get_single_node()
            if node is not None:
                self._read_node(loader, node, self.root, path)
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}, line {mark.line + 1}" if mark else path
            self.problems.append(f"config: {where} is not valid YAML: {getattr(error, 'problem', None) or error}")

    def _read_node(self, loader: Loader, node: yaml.Node, section: Section, file: str) -> None:
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
                self.problems.append(f"{join(section.path, name)} is given twice ({where}); keep one")
            seen.add(name)
        loader.flatten_mapping(node)
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(loader.construct_object(key, deep=True))
            path, origin = join(section.path, name), f"{file}, line {key.start_mark.line + 1}"
            if path in self.sections:
                self._read_node(loader, value, self.sections[path], file)
            else:
                content = loader.construct_object(value, deep=True)
                self._assign(path, Given(value=content, origin=origin, from_argv=False))

    def _assign(self, path: str, given: Given) -> None:
        owner = next((leaf for leaf in self.leaves.values() if path.startswith(f"{leaf.path}.")), None)
        if path in self.leaves:
            self.given[path] = given
        elif path in self.sections:
            names = [*self.sections[path].leaves, *self.sections[path].sections]
            self.problems.append(f"{path} is a section ({given.origin}); set its options: {path}.{names[0]}, ...")
        elif owner is not None and (hint := dict_hint(owner.hint)) is not None:
            try:
                before = coerce(owner.hint, self.given[owner.path]) if owner.path in self.given else owner.default
            except ValueError:
                return  # What was given first stays, and is reported when the section is built.
            entries = before if isinstance(before, dict) else {}
            merged = with_entry(entries, hint, path.removeprefix(f"{owner.path}."), given.value)
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

    def build(self, section: Section) -> Any:
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
                    values[name] = coerce(leaf.hint, self.given[leaf.path])
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
            found = [text for text in found if text.split(" ", 1)[0] in sound and wrong.isdisjoint(words(text))]
        self.problems.extend(self._located(self._qualified(text, section)) for text in found)
        return None

    def _qualified(self, problem: str, section: Section) -> str:
        first = next(iter(words(problem)), "")
        if first in section.leaves or first in section.sections or not section.path:
            return join(section.path, problem)
        return f"{section.path}: {problem}"

    def _located(self, problem: str) -> str:
        given = self.given.get(problem.split(" ", 1)[0])
        return f"{problem} ({given.origin})" if given else problem
