"""The parts that the objectives' pictures are made of: text, boxes, arrows, grids of cells, and the sheet around them.

A sheet has a white ground of its own, so that a picture reads the same on the site's light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

INK, FAINT, LINE = "#1d1f27", "#5b5f6d", "#d5d8e0"
BLUE, ORANGE, GREEN, VIOLET = "#4f6bd8", "#c9683c", "#3d8b5f", "#8a5bb5"


def text(x: float, y: float, words: str, at: str = "middle", **style: str | float) -> str:
    """Return a line of text; ``at`` is start, middle or end, and style is SVG's, with ``_`` for ``-``."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{at}"{extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "", strong: bool = True) -> str:
    """Return a rounded box in a colour with text in its middle; a weak one is only outlined."""
    fill = f"{colour}55" if strong else "none"
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{colour}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4.5, words) if words else "")


def arrow(*points: tuple[float, float], colour: str = FAINT) -> str:
    """Return a line through points with a head at its end."""
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5" marker-end="url(#head)"/>'


def grid(
    x: float, y: float, cell: float, rows: int, columns: int, colour: Callable[[int, int], str | None]
) -> list[str]:
    """Return cells, each in the colour that its row and column ask for; None leaves it empty."""
    parts = []
    for row in range(rows):
        for column in range(columns):
            wanted = colour(row, column)
            fill, stroke = (f"{wanted}66", wanted) if wanted else ("none", LINE)
            parts.append(
                f'<rect x="{x + column * cell:g}" y="{y + row * cell:g}" width="{cell - 2:g}" height="{cell - 2:g}"'
                f' rx="2" fill="{fill}" stroke="{stroke}"/>'
            )
    return parts


def legend(x: float, y: float, entries: Iterable[tuple[str, str]], step: float = 20) -> list[str]:
    """Return coloured squares with what they mean, one below the other."""
    parts = []
    for number, (colour, words) in enumerate(entries):
        parts.append(box(x, y + number * step, 13, 13, colour))
        parts.append(text(x + 20, y + number * step + 11, words, "start"))
    return parts


def sheet(width: int, height: int, parts: Iterable[str]) -> str:
    """Return the whole picture."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        f' font-size="13" fill="{INK}"><defs>{head}</defs>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
