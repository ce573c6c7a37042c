"""The shape of a tree of config dataclasses: its sections and leaves, with defaults and explanations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import Any, get_type_hints

import docstring_parser


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One option."""

    path: str
    hint: Any
    default: Any
    doc: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One config dataclass in the tree."""

    path: str
    cls: type
    doc: str
    default: Any
    leaves: dict[str, Leaf]
    sections: dict[str, Section]

    def all_sections(self) -> Iterable[Section]:
        """This section and all below it."""
        yield self
        for section in self.sections.values():
            yield from section.all_sections()


_RESERVED = ("config", "help", "print_config")


def describe(cls: type, path: str, instance: object) -> Section:
    """Describe a config class; `instance` holds the defaults where its owner sets them, else it is MISSING."""
    hints = get_type_hints(cls)
    docs = _field_docs(cls)
    leaves: dict[str, Leaf] = {}
    sections: dict[str, Section] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, child = hints[field.name], join(path, field.name)
        if child in _RESERVED:
            raise TypeError(f"{cls.__name__}.{field.name}: the names {', '.join(_RESERVED)} are taken by the parser")
        if instance is not MISSING:
            default = getattr(instance, field.name)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        else:
            default = field.default
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections[field.name] = describe(hint, child, default)
        else:
            leaves[field.name] = Leaf(path=child, hint=hint, default=default, doc=docs.get(field.name, ""))
    return Section(path=path, cls=cls, doc=_summary(cls), default=instance, leaves=leaves, sections=sections)


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


def words(text: str) -> list[str]:
    """The words of a problem."""
    return re.findall(r"\w+", text)


def join(path: str, name: str) -> str:
    """The dotted name of a field."""
    return f"{path}.{name}" if path else name
