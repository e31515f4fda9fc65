"""The curve in the terminal."""

from __future__ import annotations

import math

import pytest

from torchturbo.quickstart.plot import draw

FALLING = [(step, 3.0 / step) for step in range(1, 21)]


def test_ascii_picture() -> None:
    assert draw([(1, 2.0), (2, 1.0), (3, 0.0)], width=14, height=5, unicode=False) == [
        "2.0 |**",
        "    |  *",
        "1.0 |   ***",
        "    |      *",
        "0.0 |       **",
        "    +---------",
        "     step 1  3",
    ]


def test_braille_picture() -> None:
    assert draw([(1, 4.0), (20, 0.0)], width=12, height=2) == [
        "4.0 │⠑⠢⢄⡀",
        "0.0 │   ⠈⠑⠢⢄",
        "    └───────",
        "     step 1 20",
    ]


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [30, 60, 100])
@pytest.mark.parametrize("height", [2, 5, 8])
def test_it_fits(width: int, height: int, unicode: bool) -> None:
    lines = draw(FALLING, width, height, unicode=unicode)
    assert len(lines) == height + 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("3.0")
    assert lines[height - 1].startswith("0.0")


def test_every_column_holds_the_line() -> None:
    lines = draw(FALLING, 60, 7)
    columns = max(map(len, lines))
    curve = [line.ljust(columns)[5:] for line in lines[:7]]
    assert all(any(row[column] != " " for row in curve) for column in range(columns - 5 - 1))


@pytest.mark.parametrize(
    ("points", "first"),
    [
        ([(1, 2.5)], "2.5"),
        ([(1, 2.0), (2, 2.0)], "2.0"),
        ([(1, 0.0), (2, 0.0)], "0.0"),
        ([(1, math.nan), (2, 1.5), (3, math.inf), (4, 0.5)], "1.5"),
        ([(1, -1.0), (2, -3.0)], "-1.0"),
    ],
)
def test_odd_curves_are_drawn(points: list[tuple[float, float]], first: str) -> None:
    lines = draw(points, 40, 5)
    assert len(lines) == 7
    assert lines[0].strip().startswith(first)


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_nothing_to_draw(points: list[tuple[float, float]]) -> None:
    assert draw(points, 40, 5) == []
