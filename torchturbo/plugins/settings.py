"""A plugin's CONFIG file: read as plain values that know their place, and checked against the plugin's JSON Schema."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchturbo.config.document import Node, Row, Scalar, Table, read_document
from torchturbo.config.scalars import FILE_BOOLEANS, FILE_NULLS, LONGEST_NUMBER, number
from torchturbo.errors import Problem, shorten

Steps = Sequence[str | int]
"""The way from the root of a document to a value: keys and positions."""


class Document(NamedTuple):
    """One settings file: what it says, and where."""

    path: str
    root: Table
    values: dict[str, Any]
    """Plain Python values: dict, list, str, int, float, bool, None; keys are texts, as in JSON."""

    def node(self, steps: Steps) -> Node:
        """Return the node at the end of a way, or the last one of it that the file has."""
        node: Node = self.root
        for step in steps:
            if isinstance(node, Table):
                found = next((child for key, child in node.items if key.text == step), None)
            elif isinstance(node, Row) and isinstance(step, int) and step < len(node.items):
                found = node.items[step]
            else:
                found = None
            if found is None:
                return node
            node = found
        return node

    def key(self, steps: Steps, name: str) -> Node:
        """Return a key itself, of the mapping at the end of a way."""
        table = self.node(steps)
        keys = table.items if isinstance(table, Table) else ()
        return next((key for key, _ in keys if key.text == name), table)

    def place(self, node: Node) -> str:
        """Return ``path:line:column``."""
        return f"{self.path}:{node.line}:{node.column}"


def read_settings(path: str) -> tuple[Document | None, list[Problem]]:
    """Read a settings file, YAML or JSON, by the rules of YAML 1.2's core schema.

    An empty file is an empty mapping. What the core schema reads and people do not mean, a number with leading
    zeros, is a problem and not a guess.

    Returns
    -------
    tuple
        What the file says, and everything that is wrong with it; None where it cannot be read to its end.

    """
    node, problems = read_document(path)
    if node is None:
        return (None if problems else Document(path, Table(1, 1), {})), problems
    if not isinstance(node, Table):
        found = "a list" if isinstance(node, Row) else f'"{shorten(node.text)}"'
        message = f"expected a mapping of settings, got {found}"
        return None, [*problems, Problem(f"{path}:{node.line}:{node.column}", "", message, "write `key: value` lines")]
    values = _Reading(path, problems).value(node, ())
    problems.sort(key=lambda problem: _position(problem.place, path))
    return Document(path, node, values), problems


def _position(place: str, path: str) -> list[int]:
    return [int(part) for part in place.removeprefix(f"{path}:").split(":") if part.isdigit()]


class _Reading:
    """Turns nodes into values; what is ambiguous becomes a problem."""

    def __init__(self, path: str, problems: list[Problem]) -> None:
        self.path = path
        self.problems = problems

    def value(self, node: Node, steps: tuple[str | int, ...]) -> Any:
        # Nodes are nested MAX_DEPTH levels deep at most, so walking them recursively is safe.
        if isinstance(node, Table):
            return {key.text: self.value(child, (*steps, key.text)) for key, child in node.items}
        if isinstance(node, Row):
            return [self.value(child, (*steps, at)) for at, child in enumerate(node.items)]
        return self._scalar(node, steps)

    def _scalar(self, node: Scalar, steps: Steps) -> Any:
        text = node.text
        if node.quoted:
            return text
        if text in FILE_NULLS:
            return None
        if text in FILE_BOOLEANS:
            return FILE_BOOLEANS[text]
        value = number(text)
        if value is None and re.fullmatch(r"[-+]?[0-9]+", text):
            place = f"{self.path}:{node.line}:{node.column}"
            self.problems.append(Problem(place, dotted(steps), *_no_number(text)))
        return text if value is None else value


def _no_number(text: str) -> tuple[str, str]:
    """Return message and remedy for digits that are no number here."""
    if len(text) > LONGEST_NUMBER:
        return f"a number of {len(text)} digits", "put a text in quotes"
    bare = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", text)
    return f"{text}: a number with leading zeros", f"write {bare}, or put a text in quotes"


def not_finite(document: Document) -> list[Problem]:
    """Return a problem for each number that JSON, and so a JSON Schema, does not know: ``.inf``, ``.nan``, ``1e999``."""
    problems = []
    for steps, value in _leaves(document.values, ()):
        if isinstance(value, float) and not math.isfinite(value):
            node = document.node(steps)
            shown = node.text if isinstance(node, Scalar) else value
            problems.append(Problem(document.place(node), dotted(steps), f"expected a finite number, got {shown}"))
    return problems


def _leaves(value: Any, steps: tuple[str | int, ...]) -> Iterable[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*steps, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _leaves(item, (*steps, at))
    else:
        yield steps, value


def dotted(steps: Steps) -> str:
    """Return a way in words: ``ranges[2].high``."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{shorten(step)}" for step in steps)
    return "".join(parts).removeprefix(".")
