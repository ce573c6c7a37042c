"""Imports point down: no module of bupo imports from a higher floor, and no modules import one another in a circle.

The checker reads sources and imports nothing. It counts every import statement, wherever it stands: at module level,
inside functions and under TYPE_CHECKING, since a hidden upward import tangles the design as much as an open one.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "bupo"

# A name covers the module or package of that name and all below it; the longest name that fits decides.
FLOORS = {
    "records": 0,
    "config": 0,
    "tracking": 0,
    "intervals": 0,
    "progress": 0,
    "devices": 0,
    "policies": 1,
    "coordinators": 2,
    "negotiation": 2,
    "rollout": 3,
    "learn": 3,
    "evaluator": 3,
    "balancer": 3,
    "selfplay": 4,
    "measures": 5,
    "evaluate": 5,
    "summary": 5,
    "checkpoint": 5,
    "run": 6,
    "train": 6,
    "report": 7,
    "cli": 7,
}


# --- the checker --------------------------------------------------------------------------------------------------


def read_sources(package: Path) -> dict[str, str]:
    """Map each file of a package folder, by dotted name (`bupo.__init__`, `bupo.config`), to its source."""
    paths = sorted(package.rglob("*.py"))
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths]
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


def module_of(file: str) -> str:
    """Give the module a file defines: a package's `__init__` defines the package."""
    return file.removesuffix(".__init__")


def imported_modules(file: str, source: str, modules: set[str]) -> set[str]:
    """Name the package's modules that a file imports (an unknown one too, so that a typo does not hide)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # One dot is the package that holds the file; a package's __init__ is held by the package itself.
                parts = file.split(".")[: -node.level]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                child = f"{base}.{alias.name}"
                found.add(child if child in modules else base)
    return {name for name in found if name.split(".")[0] == PACKAGE} - {module_of(file)}


def floor_of(module: str, floors: dict[str, int]) -> int | None:
    """Give a module's floor by the longest name in the table that covers it; None when there is none."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in floors:
            return floors[name]
    return None


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the modules of one import circle, the first again at the end, or None."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return None
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target, [*trail, module]):
                return cycle
        done.add(module)
        return None

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), None)


def check(sources: dict[str, str], floors: dict[str, int] = FLOORS) -> list[str]:
    """List what is wrong with the imports of a package given as {file: source}."""
    modules = {module_of(file) for file in sources}
    graph = {module_of(file): imported_modules(file, source, modules) for file, source in sources.items()}
    problems = []
    for module in sorted(modules):
        if module == PACKAGE:
            # The root is loaded before every other module, so what it imports would be imported by all.
            problems += [f"{PACKAGE}/__init__.py imports {target}; it may not" for target in sorted(graph[module])]
            continue
        own = floor_of(module, floors)
        if own is None:
            problems.append(f"{module} has no floor; add it to FLOORS")
            continue
        for target in sorted(graph[module] - {PACKAGE}):
            other = floor_of(target, floors)
            if target not in modules:
                problems.append(f"{module} imports {target}, which does not exist")
            elif other is not None and other > own:
                problems.append(f"{module} (floor {own}) imports {target} (floor {other}); imports go down")
    if cycle := find_cycle(graph):
        problems.append(f"import circle: {' -> '.join(cycle)}")
    return problems


# --- the real tree ------------------------------------------------------------------------------------------------

SOURCES = read_sources(Path(__file__).resolve().parents[1] / PACKAGE)


def test_imports_of_the_package_go_down_and_in_no_circle():
    assert "bupo.tracking" in SOURCES
    assert check(SOURCES) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from bupo.cli import main",
        "import bupo.cli",
        "import bupo.cli as c",
        "from bupo import cli",
        "from . import cli",
        "from .cli import main",
        "def f():\n    from bupo.cli import main",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bupo.cli import main",
    ],
)
def test_one_upward_import_added_to_the_real_tree_is_found(statement):
    tree = {"bupo.cli": "", **SOURCES}
    tree["bupo.tracking"] += f"\n{statement}\n"
    assert "bupo.tracking (floor 0) imports bupo.cli (floor 7); imports go down" in check(tree)


def test_a_circle_added_to_the_real_tree_is_found_even_within_a_floor():
    tree = {**SOURCES, "bupo.records": "from bupo import tracking\n"}
    tree["bupo.tracking"] += "\nfrom bupo import records\n"
    assert "import circle: bupo.records -> bupo.tracking -> bupo.records" in check(tree)


def test_a_new_module_without_a_floor_is_found():
    assert check({**SOURCES, "bupo.helpers": ""}) == ["bupo.helpers has no floor; add it to FLOORS"]


# --- the checker, on small trees ----------------------------------------------------------------------------------


def test_downward_and_level_imports_are_fine():
    sources = {
        "bupo.__init__": '__version__ = "1"\n',
        "bupo.config": "import torch\nfrom transformers import cli\n",
        "bupo.policies.__init__": "from .pool import Pool\n",
        "bupo.policies.pool": "from bupo.config import x\nfrom .. import config, __version__\nfrom ..config import y\n",
        "bupo.policies.value": "from . import pool\nfrom .pool import Pool\n",
        "bupo.learn.ppo": "import bupo.policies.pool\nfrom bupo.policies import Pool, value\n",
        "bupo.learn.__init__": "",
    }
    assert check(sources) == []


def test_relative_imports_are_resolved_from_modules_and_from_packages():
    modules = {"bupo", "bupo.a", "bupo.a.b", "bupo.a.c", "bupo.d"}
    assert imported_modules("bupo.a.b", "from . import c", modules) == {"bupo.a.c"}
    assert imported_modules("bupo.a.b", "from . import name", modules) == {"bupo.a"}
    assert imported_modules("bupo.a.b", "from .. import d", modules) == {"bupo.d"}
    assert imported_modules("bupo.a.__init__", "from . import c\nfrom .b import x", modules) == {"bupo.a.c", "bupo.a.b"}
    assert imported_modules("bupo.a.__init__", "from .. import d\nfrom ..d import x", modules) == {"bupo.d"}
    assert imported_modules("bupo.__init__", "from . import d", modules) == {"bupo.d"}


def test_a_package_without_modules_is_read_as_a_package():
    sources = {"bupo.policies.__init__": "from ..cli import main", "bupo.cli": ""}
    assert check(sources) == ["bupo.policies (floor 1) imports bupo.cli (floor 7); imports go down"]


def test_upward_imports_are_found_between_packages():
    sources = {"bupo.policies.pool": "from ..learn.ppo import x", "bupo.learn.ppo": "", "bupo.learn.__init__": ""}
    assert check(sources) == ["bupo.policies.pool (floor 1) imports bupo.learn.ppo (floor 3); imports go down"]


def test_circles_of_any_length_are_found():
    sources = {
        "bupo.learn.a": "from bupo.learn import b",
        "bupo.learn.b": "def f():\n    import bupo.learn.c",
        "bupo.learn.c": "from .a import x",
        "bupo.learn.__init__": "",
    }
    assert check(sources) == ["import circle: bupo.learn.a -> bupo.learn.b -> bupo.learn.c -> bupo.learn.a"]


def test_a_package_and_its_module_can_form_a_circle():
    sources = {"bupo.learn.__init__": "from .a import x", "bupo.learn.a": "from . import y"}
    assert check(sources) == ["import circle: bupo.learn -> bupo.learn.a -> bupo.learn"]


def test_the_root_may_import_nothing_of_the_package():
    assert check({"bupo.__init__": "from .config import parse", "bupo.config": ""}) == [
        "bupo/__init__.py imports bupo.config; it may not"
    ]


def test_an_import_of_a_module_that_does_not_exist_is_found():
    assert check({"bupo.cli": "from bupo.trian import x"}) == ["bupo.cli imports bupo.trian, which does not exist"]


def test_the_longest_name_decides_the_floor():
    floors = {"learn": 3, "learn.types": 0}
    assert floor_of("bupo.learn.types", floors) == 0
    assert floor_of("bupo.learn.ppo", floors) == 3
    assert floor_of("bupo.learner", floors) is None
