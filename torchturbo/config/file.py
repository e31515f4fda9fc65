"""Read a configuration file into a layer: the schema's view of a document's nodes."""

from __future__ import annotations

from contextlib import suppress

from torchturbo.config.document import Node, Row, Scalar, Table, read_document
from torchturbo.config.document.nodes import MAX_PROBLEMS
from torchturbo.config.keys import Alias, Key, Section
from torchturbo.config.layers import Layer, Reading, former_names
from torchturbo.config.names import nearest
from torchturbo.config.scalars import FILE_NULLS, Written
from torchturbo.errors import Problem, shorten
from torchturbo.generated.keys import FLAG_PREFIX, KEYS, SECTIONS


def read_file(path: str) -> Reading:
    """Return what a file says; its problems carry ``path:line:column`` and stand in the order of the file."""
    node, problems = read_document(path)
    reading = Reading(Layer.FILE)
    reading.problems += problems
    if node is not None:
        with suppress(_Enough):
            _Walk(path, reading).section(node, SECTIONS[""])
    reading.problems.sort(key=lambda problem: _position(problem.place, path))
    return reading


class _Enough(Exception):
    """As many problems as a reader of them can use."""


class _Walk:
    """One walk over the nodes of a file."""

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        self.former: dict[str, tuple[Key, Alias]] = former_names(KEYS, "path")

    def section(self, node: Node, section: Section) -> None:
        """Read a section; an empty one, or null, means its defaults."""
        if isinstance(node, Scalar) and not node.quoted and node.text in FILE_NULLS:
            return
        if not isinstance(node, Table):
            where = f"the section {section.path}" if section.path else "a mapping of keys"
            remedy = f"its keys are {', '.join(section.names)}" if section.path else "write one `key: value` a line"
            self._problem(node, section.path, f"expected {where}, got {_kind(node)}", remedy)
            return
        prefix = f"{section.path}." if section.path else ""
        for name, child in node.items:
            path = prefix + name.text
            here = name.text in section.names  # a dotted name at the top is no path
            if here and path in SECTIONS:
                self.section(child, SECTIONS[path])
            elif here:
                self._value(child, KEYS[path], path, None)
            elif path in self.former and "." not in name.text:
                key, alias = self.former[path]
                self._value(child, key, path, alias)
            else:
                shown = prefix + shorten(name.text)
                self._problem(name, shown, "unknown key", _remedy(name.text, section))

    def _value(self, node: Node, key: Key, spelling: str, alias: Alias | None) -> None:
        if not isinstance(node, Scalar):
            self._problem(node, key.path, f"expected {key.expectation}, got {_kind(node)}")
            return
        written = Written(node.text, node.quoted, in_file=True)
        self.reading.take(key, written, self._place(node), spelling=spelling, alias=alias)

    def _problem(self, node: Node, path: str, message: str, remedy: str = "") -> None:
        self.reading.problems.append(Problem(self._place(node), path, message, remedy))
        if len(self.reading.problems) >= MAX_PROBLEMS:
            message = f"{MAX_PROBLEMS} problems up to here; the rest is not read"
            self.reading.problems.append(Problem(self._place(node), "", message, "is it the right file?"))
            raise _Enough

    def _place(self, node: Node) -> str:
        return f"{self.path}:{node.line}:{node.column}"


def _kind(node: Node) -> str:
    if isinstance(node, Scalar):
        return f'string "{shorten(node.text)}"' if node.quoted else shorten(node.text)
    return "a list" if isinstance(node, Row) else "a section"


def _remedy(name: str, section: Section) -> str:
    """Return what a person may have meant by a key that does not exist here."""
    for key in KEYS.values():  # another surface's name for a key
        if name in (key.cli, key.env, key.arg, key.name, key.cli and key.cli.removeprefix("--")):
            if key.runtime:
                return f"it belongs to one launch: use {key.cli}"
            return f"in a file it is {key.path}"
    if "." in name and (name in KEYS or name in SECTIONS):
        parent, _, leaf = name.rpartition(".")
        return f"nest it: {leaf} under {parent}"
    if name.startswith(FLAG_PREFIX):
        return "options are for the command line; a file holds nested keys"
    close = nearest(name, section.names)
    if close:
        return f"did you mean {close[0]}?"
    elsewhere = [path for path in KEYS if path.rpartition(".")[2] == name and not KEYS[path].runtime]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    if section.path:
        return f"the keys here are {', '.join(section.names)}"
    return (
        "options of the training framework go on the command line; `torchturbo config init -` lists the keys of a file"
    )


def _position(place: str, path: str) -> tuple[int, int]:
    line, _, column = place.removeprefix(path).lstrip(":").partition(":")
    return (int(line), int(column)) if line.isdigit() and column.isdigit() else (0, 0)
