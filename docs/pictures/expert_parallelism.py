"""Draws docs/assets/expert-parallelism.svg: four ranks, two of which share a set of experts.

Run it after a change: ``python docs/pictures/expert_parallelism.py``. A test holds the committed file to it.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[1] / "assets" / "expert-parallelism.svg"
WIDTH, HEIGHT = 760, 430
LEFT, STEP, BOX = 130, 155, 125
ROWS = {"tokens": 60, "router": 120, "experts": 235, "sum": 350}
COLOURS = ("#4f6bd8", "#c9683c")
"""One for each half of the experts."""


def box(x: float, y: float, lines: list[str], colour: str, height: int = 40) -> str:
    """Return a rounded box with centred lines of text."""
    first = y + height / 2 + 4 - 7 * (len(lines) - 1)
    texts = "".join(
        f'<text x="{x + BOX / 2:g}" y="{first + 15 * at:g}" text-anchor="middle">{line}</text>'
        for at, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{height}" rx="6" fill="{colour}22" stroke="{colour}"/>{texts}'
    )


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    """Return a line with a head."""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.6"'
        f' marker-end="url(#{"first" if colour == COLOURS[0] else "second"})"/>'
    )


def column(rank: int) -> list[str]:
    """Return the boxes of a rank and the arrows from it."""
    x, group, half = LEFT + rank * STEP, rank // 2, rank % 2
    middle = x + BOX / 2
    grey, colour = "#777777", COLOURS[half]
    parts = [
        f'<text x="{middle:g}" y="34" text-anchor="middle" font-weight="bold">rank {rank}</text>',
        box(x, ROWS["tokens"], ["its own tokens"], grey),
        box(x, ROWS["router"], ["attention, router"], grey),
        box(
            x,
            ROWS["experts"],
            [f"experts {4 * half} to {4 * half + 3}", f"stores half {'ab'[group]}"],
            colour,
            46,
        ),
        box(x, ROWS["sum"], ["weighted sums"], grey),
    ]
    for other in (0, 1):
        there = LEFT + (2 * group + other) * STEP + BOX / 2
        shift = 14 if other else -14
        parts.append(arrow(middle + shift, ROWS["router"] + 42, there - shift / 2, ROWS["experts"] - 4, COLOURS[other]))
        parts.append(arrow(middle - shift / 2, ROWS["experts"] + 48, there + shift, ROWS["sum"] - 4, colour))
    return parts


def drawing() -> str:
    """Return the picture."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for name, colour in zip(("first", "second"), COLOURS, strict=True)
    )
    labels = {
        "tokens": ["data"], "router": ["all ranks: FSDP"], "experts": ["ep_fsdp: 0 and 2,", "1 and 3"], "sum": ["result"],
    }  # fmt: skip
    sides = [
        f'<text x="8" y="{ROWS[row] + 24 - 7 * (len(lines) - 1) + 15 * at:g}" fill="#555555">{line}</text>'
        for row, lines in labels.items()
        for at, line in enumerate(lines)
    ]
    between = [
        f'<text x="8" y="{(ROWS[above] + ROWS[below]) / 2 + 18 + 15 * at:g}" fill="#555555">{line}</text>'
        for above, below, says in (("router", "experts", "tokens to experts"), ("experts", "sum", "results back"))
        for at, line in enumerate(("all-to-all:", says))
    ]
    groups = [
        f'<rect x="{LEFT + 2 * at * STEP - 8:g}" y="44" width="{STEP + BOX + 16}" height="{HEIGHT - 62}" rx="10"'
        ' fill="none" stroke="#999999" stroke-dasharray="5 4"/>'
        f'<text x="{LEFT + (2 * at + 1) * STEP - 15:g}" y="{HEIGHT - 5}" text-anchor="middle" fill="#555555">ep group</text>'
        for at in (0, 1)
    ]
    parts = [*groups, *sides, *between, *(part for rank in range(4) for part in column(rank))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>\n<defs>{heads}</defs>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
