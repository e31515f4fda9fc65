"""What the commands share in the look of a terminal: colour, width, columns."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from torchturbo.errors import wants_colour

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def paint(text: str, *styles: str) -> str:
    """Return a text in a style, where standard output is a terminal that wants colour."""
    return f"\033[{';'.join(styles)}m{text}\033[0m" if styles and text and wants_colour(sys.stdout) else text


def width() -> int:
    """Return the columns to write into: the terminal's, but no more than people like to read."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 120))


def wrap(text: str, indent: str = "") -> str:
    """Return a text wrapped to the terminal."""
    return textwrap.fill(text, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def columns(rows: Iterable[Sequence[str]], styles: Iterable[Sequence[str]] = ()) -> str:
    """Return rows in aligned columns, each row in its own style."""
    rows = [list(row) for row in rows]
    styles = [*styles, *([()] * len(rows))][: len(rows)]
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row, style in zip(rows, styles, strict=True):
        cells = [cell.ljust(size) for cell, size in zip(row, sizes, strict=True)]
        lines.append(paint("  ".join(cells).rstrip(), *style))
    return "\n".join(lines)


def fits(text: str) -> bool:
    """Return whether a text can be shown as it is: on a narrow terminal its lines must not be broken anywhere."""
    if not sys.stdout.isatty():
        return True
    size = shutil.get_terminal_size((100, 24)).columns
    return all(len(re.sub(r"\033\[[0-9;]*m", "", line)) <= size for line in text.splitlines())


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and their texts side by side, the texts wrapped to the terminal."""
    rows = list(rows)
    size = max(len(name) for name, _ in rows) + 2
    lines = (
        textwrap.fill(
            text,
            width(),
            initial_indent=name.ljust(size),
            subsequent_indent=" " * size,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for name, text in rows
    )
    return "\n".join(lines)
