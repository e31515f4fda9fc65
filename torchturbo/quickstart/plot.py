"""A line drawn in a terminal, in braille dots (two by four to a character) or plain ASCII."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[float, float]

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character, [row][column] (Unicode block U+2800)."""
BRAILLE = 0x2800


def draw(points: Sequence[Point], width: int, height: int, *, unicode: bool = True, x_name: str = "step") -> list[str]:
    """Return the lines of a plot: y axis with its bounds, the curve, x axis with its bounds.

    Args:
        points: (x, y) in order of x; points whose y is not finite are left out.
        width: columns of the whole picture, axis labels included.
        height: rows of the curve itself.
        unicode: braille dots and box lines; else ASCII.
        x_name: what the x axis counts.

    Returns:
        ``height`` + 2 lines, or none if there is nothing to draw.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return []
    x_low, x_high = points[0][0], points[-1][0]
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    y_low = min(0.0, y_low)  # a loss curve that does not start at zero overstates its fall
    labels = _labels(y_low, y_high, height)
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 4)
    scale_x, scale_y = (2, 4) if unicode else (1, 1)
    grid = _Grid(columns * scale_x, height * scale_y, (x_low, x_high), (y_low, y_high))
    lit = set(grid.line(points))
    cells = _braille(lit, columns, height) if unicode else _ascii(lit, columns, height)
    bar, corner, dash = ("│", "└", "─") if unicode else ("|", "+", "-")
    rows = [f"{label:>{margin}} {bar}{cell}".rstrip() for label, cell in zip(labels, cells, strict=True)]
    left, right = f"{x_name} {x_low:g}", f"{x_high:g}"
    ends = left + right.rjust(max(columns - len(left), len(right) + 1)) if x_high > x_low else left
    return [*rows, " " * margin + f" {corner}{dash * columns}", " " * (margin + 2) + ends]


def _labels(low: float, high: float, height: int) -> list[str]:
    labels = [""] * height
    labels[-1] = f"{low:.1f}"
    labels[0] = f"{high:.1f}"
    if height >= 5 and height % 2:
        labels[height // 2] = f"{(low + high) / 2:.1f}"
    return labels


class _Grid:
    """Dots [column, row] from the top left, and where a point falls among them."""

    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.rows, self.x, self.y = columns, rows, x, y

    def dot(self, point: Point) -> tuple[int, int]:
        return (
            round(_share(point[0], *self.x) * (self.columns - 1)),
            round((1.0 - _share(point[1], *self.y)) * (self.rows - 1)),
        )

    def line(self, points: Sequence[Point]) -> Iterator[tuple[int, int]]:
        yield self.dot(points[0])
        for (x0, y0), (x1, y1) in zip(map(self.dot, points), map(self.dot, points[1:]), strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(1, steps + 1):
                yield round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _braille(lit: set[tuple[int, int]], columns: int, rows: int) -> list[str]:
    bits = [[0] * columns for _ in range(rows)]
    for x, y in lit:
        bits[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(chr(BRAILLE + cell) if cell else " " for cell in row) for row in bits]


def _ascii(lit: set[tuple[int, int]], columns: int, rows: int) -> list[str]:
    return ["".join("*" if (x, y) in lit else " " for x in range(columns)) for y in range(rows)]
