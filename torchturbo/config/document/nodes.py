"""The tree of a configuration document: nodes that know their place, and the builder that both readers share."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final, TypeAlias

from torchturbo.errors import Problem, shorten

MAX_DEPTH: Final = 100
"""Sections and lists inside one another, aliases followed. Consumers may walk the tree recursively."""
MAX_NODES: Final = 100_000
"""Keys and values of one document, each alias counted as what it stands for: what a walk over the tree visits."""
MAX_PROBLEMS: Final = 100
"""Problems of single keys and values after which a file is taken for the wrong one and not read on."""
LONGEST_PATH: Final = 300
"""Characters that an error shows of the names that lead to a place."""

MERGE_KEY: Final = "<<"


class Scalar:
    """One key or value as written, not yet read as a number, boolean or text.

    Attributes:
        text: the characters it stands for, escapes resolved.
        quoted: whether it is a string by its form (quotes, ``|``, ``>``, ``!!str``) whatever its characters.
        line, column: where it starts, from 1; columns count characters.
    """

    __slots__ = ("column", "line", "quoted", "text")

    def __init__(self, text: str, quoted: bool, line: int, column: int) -> None:
        self.text = text
        self.quoted = quoted
        self.line = line
        self.column = column

    def __repr__(self) -> str:
        return f"Scalar({self.text!r}, {self.quoted}, {self.line}:{self.column})"


class Table:
    """A mapping: pairs of key and value in the order written, no key twice, merge keys applied."""

    __slots__ = ("column", "items", "line")

    def __init__(self, line: int, column: int) -> None:
        self.items: list[tuple[Scalar, Node]] = []
        self.line = line
        self.column = column

    def __repr__(self) -> str:
        return f"Table({self.items!r}, {self.line}:{self.column})"


class Row:
    """A sequence."""

    __slots__ = ("column", "items", "line")

    def __init__(self, line: int, column: int) -> None:
        self.items: list[Node] = []
        self.line = line
        self.column = column

    def __repr__(self) -> str:
        return f"Row({self.items!r}, {self.line}:{self.column})"


Node: TypeAlias = Scalar | Table | Row


class Refused(Exception):
    """A document that is not read any further; the argument is the :class:`Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


class Branch:
    """A mapping or sequence that is being built, or was: what an alias to it has to know."""

    __slots__ = ("closed", "drop", "height", "is_key", "key", "merges", "merging", "node", "seen", "size", "start")

    def __init__(self, node: Table | Row, start: int, is_key: bool) -> None:
        self.node: Any = node
        self.seen: dict[str, Scalar] | None = {} if type(node) is Table else None  # None marks a sequence
        self.key: Scalar | None = None  # the key whose value comes next
        self.drop = False  # whether that value is left out
        self.merging = False  # whether that value is merged
        self.merges: list[Table] = []
        self.is_key = is_key  # a mapping or sequence in the place of a key: refused, but still read
        self.closed = False
        self.height = 1
        self.start = start  # nodes counted before this one
        self.size = 0


class TreeBuilder:
    """Puts nodes together as they are read, on a stack of its own, so that no nesting can exhaust Python's.

    What is wrong with a part of the document is collected in ``problems`` and that part left out: the rest can still
    be checked. What makes the rest meaningless or dangerous to read raises :class:`Refused`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._stack: list[Branch] = []
        self._count = 0

    def place(self, line: int, column: int) -> str:
        """Return ``path:line:column``."""
        return f"{self.path}:{line}:{column}"

    def report(self, line: int, column: int, message: str, remedy: str = "") -> None:
        """Collect a problem of the key or value that is being read."""
        self.problems.append(Problem(self.place(line, column), self._key(), message, remedy))
        if len(self.problems) >= MAX_PROBLEMS:
            message = f"{MAX_PROBLEMS} problems up to here; the rest is not read"
            raise Refused(Problem(self.place(line, column), "", message, "is it the right file?"))

    def refuse(self, line: int, column: int, message: str, remedy: str = "") -> Refused:
        """Return the error that ends the reading here."""
        return Refused(Problem(self.place(line, column), self._key(), message, remedy))

    def open(self, node: Table | Row) -> Branch:
        """Start a mapping or sequence; what is added from now on belongs to it, until :meth:`close`."""
        stack = self._stack
        if len(stack) >= MAX_DEPTH:
            raise self._too_deep(node.line, node.column)
        self._grow(1, node.line, node.column)
        is_key = bool(stack) and stack[-1].seen is not None and stack[-1].key is None
        if is_key:
            self._report_complex_key(node.line, node.column)
        branch = Branch(node, self._count - 1, is_key)
        stack.append(branch)
        return branch

    def close(self) -> None:
        """End the mapping or sequence opened last."""
        branch = self._stack.pop()
        if branch.merges:
            _merge(branch)
        branch.closed = True
        branch.size = self._count - branch.start
        if branch.is_key:
            self.drop(branch.node.line, branch.node.column)
        else:
            self._attach(branch.node, branch.height)

    def scalar(self, node: Scalar) -> None:
        """Add a key or a value, by turn."""
        self._count += 1
        if self._count > MAX_NODES:
            self._grow(0, node.line, node.column)
        if self._stack:
            branch = self._stack[-1]
            if branch.seen is not None and branch.key is None:
                self._take_key(branch, branch.seen, node)
                return
        self._attach(node, 0)

    def alias(self, target: Scalar | Branch, name: str, line: int, column: int) -> None:
        """Add what an alias at line and column stands for. The node is shared, never copied."""
        if isinstance(target, Scalar):
            self.scalar(target)
            return
        if not target.closed:
            anchor = self.place(target.node.line, target.node.column)
            name = shorten(name)
            self.report(
                line, column, f"cyclic alias *{name}: it stands inside the value it means (&{name} at {anchor})"
            )
            self.drop(line, column)
            return
        if len(self._stack) + target.height > MAX_DEPTH:
            raise self._too_deep(line, column)
        self._grow(target.size, line, column)
        branch = self._stack[-1]
        if branch.seen is not None and branch.key is None:
            self._report_complex_key(line, column)
            self.drop(line, column)
        else:
            self._attach(target.node, target.height)

    def drop(self, line: int, column: int) -> None:
        """Leave out the key or value that stands here; with a key goes its value."""
        branch = self._stack[-1] if self._stack else None
        if branch is None or branch.seen is None:
            return  # no root; a list with an item less
        if branch.key is None:
            branch.key, branch.drop = Scalar("?", False, line, column), True
        else:
            branch.key, branch.drop, branch.merging = None, False, False

    def _take_key(self, branch: Branch, seen: dict[str, Scalar], key: Scalar) -> None:
        branch.key = key
        if key.text == MERGE_KEY and not key.quoted:
            branch.merging = True
        elif key.text in seen:
            first = seen[key.text]
            place = self.place(first.line, first.column)
            self.report(key.line, key.column, f"key given twice (first at {place})", "keep one of the two")
            branch.drop = True
        else:
            seen[key.text] = key

    def _attach(self, node: Node, height: int) -> None:
        """Put a value, whose containers reach ``height`` levels down, where it belongs."""
        if not self._stack:
            self.root = node
            return
        branch = self._stack[-1]
        if branch.merging:
            height -= 1 if type(node) is Table else 2  # the merged mappings themselves are no level of the result
        if height >= branch.height:
            branch.height = height + 1
        if branch.seen is None:
            branch.node.items.append(node)
        elif branch.merging:
            self._take_merge(branch, node)
            branch.key, branch.merging = None, False
        else:
            if not branch.drop:
                branch.node.items.append((branch.key, node))
            branch.key, branch.drop = None, False

    def _take_merge(self, branch: Branch, node: Node) -> None:
        tables = node.items if isinstance(node, Row) else [node]
        for table in tables:
            if isinstance(table, Table):
                branch.merges.append(table)
            else:
                key = branch.key or table
                found = "text" if isinstance(table, Scalar) else "a list inside the list"
                self.report(
                    key.line,
                    key.column,
                    f"expected a mapping or a list of mappings to merge, got {found}",
                    "write `<<: *name`, where &name marks a mapping",
                )

    def _grow(self, size: int, line: int, column: int) -> None:
        self._count += size
        if self._count > MAX_NODES:
            message = f"more than {MAX_NODES:,} keys and values, aliases followed"
            raise self.refuse(line, column, message, "a configuration has a few hundred")

    def _too_deep(self, line: int, column: int) -> Refused:
        # Without the key: a hundred names say nothing.
        message = f"nested deeper than {MAX_DEPTH} levels"
        return Refused(Problem(self.place(line, column), "", message, "a configuration has a few"))

    def _report_complex_key(self, line: int, column: int) -> None:
        remedy = "write the key as plain text; quote a text that starts with [ or {"
        self.report(line, column, "a mapping or a list cannot be a key", remedy)

    def _key(self) -> str:
        """Return the dotted path of what is being read, for example ``plugins[2].mtp.enabled``."""
        parts: list[str] = []
        for branch in self._stack:
            if branch.seen is None:
                parts.append(f"[{len(branch.node.items)}]")
            elif branch.key is not None:
                parts.append(f".{shorten(branch.key.text)}")
        path = "".join(parts).removeprefix(".")
        return path if len(path) <= LONGEST_PATH else f"...{path[-LONGEST_PATH:]}"


def _merge(branch: Branch) -> None:
    """Add the pairs of the merged mappings that the mapping lacks: an own key wins, then the earlier mapping."""
    known = {key.text for key, _ in branch.node.items}
    for table in branch.merges:
        for key, value in table.items:
            if key.text not in known:
                known.add(key.text)
                branch.node.items.append((key, value))


def escaped(character: str) -> str:
    """Return a character as a message can show it on any terminal."""
    return repr(character) if character.isprintable() else f"U+{ord(character):04X}"


class Places:
    """Line and column, both from 1, of a position in a text; a line ends as editors see it: LF, CR LF or CR."""

    def __init__(self, text: str) -> None:
        self._starts = [0]
        start = 0
        for line in text.splitlines(keepends=True):
            start += len(line)
            if line.endswith(("\n", "\r")):  # splitlines also ends lines at form feeds and other rare characters
                self._starts.append(start)

    def at(self, position: int) -> tuple[int, int]:
        """Return the line and column of ``text[position]``."""
        line = bisect_right(self._starts, position)
        return line, position - self._starts[line - 1] + 1
