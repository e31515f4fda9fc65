"""No two modules need each other: whoever reads one can leave the other closed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package by their dotted names."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, names: dict[str, Path]) -> Iterator[str]:
    """Yield what a module imports of its package: at its top, for types alone, and inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in names)
            if node.module in names and any(name not in names for name in inner):
                yield node.module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reached = {name: reach(name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


@pytest.mark.parametrize("package", ["torchturbo", "codegen"])
def test_no_modules_import_each_other(package: str) -> None:
    """Neither when they load, nor for types, nor later."""
    names = modules(package)
    graph = {name: set(imported(path, names)) - {name} for name, path in names.items()}
    assert len(graph) > 10
    assert [] == circles(graph)


def test_circles_are_found() -> None:
    """Of two and of three, each once."""
    graph = {"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"e"}, "e": {"c", "a"}, "f": {"a"}}
    assert [["a", "b"], ["c", "d", "e"]] == circles(graph)


COMMANDS = ("cli", "train", "quickstart", "plan")


def test_nothing_reaches_up_into_the_commands() -> None:
    """What commands are built of does not need them; a module that is started by itself is a command."""
    names = modules("torchturbo")
    above = {name for name in names if name.split(".")[1:2] and name.split(".")[1] in COMMANDS}
    below = {name: path for name, path in names.items() if name not in above and path.name != "__main__.py"}
    assert {} == {name: found for name, path in below.items() if (found := above & set(imported(path, names)))}
