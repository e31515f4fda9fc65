"""Draws docs/assets/sequence-parallelism.svg: two ranks that share a sequence, before, in and after attention.

Run it after a change: ``python docs/pictures/sequence_parallelism.py``. A test holds the committed file to it.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[1] / "assets" / "sequence-parallelism.svg"
WIDTH, HEIGHT = 760, 250
CELL, TOKENS, HEADS = 22, 8, 4
TOP, FIRST, STEP = 82, 40, 266
COLOURS = ("#4f6bd8", "#c9683c")
"""One for each rank."""
PANELS = (
    ("queries, keys, values", "all heads, half of the tokens", False),
    ("attention", "half of the heads, all tokens", True),
    ("output", "all heads, half of the tokens", False),
)


def text(x: float, y: float, words: str, extra: str = 'text-anchor="middle"') -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" {extra}>{words}</text>'


def panel(at: int, title: str, says: str, by_head: bool) -> list[str]:
    """Return a grid of heads and tokens, each cell in the colour of the rank that has it."""
    x = FIRST + at * STEP
    middle = x + TOKENS * CELL / 2
    parts = [
        text(middle, 34, title, 'text-anchor="middle" font-weight="bold"'),
        text(middle, 54, says),
    ]
    for head in range(HEADS):
        for token in range(TOKENS):
            colour = COLOURS[head * 2 // HEADS if by_head else token * 2 // TOKENS]
            left, upper = x + token * CELL, TOP + head * CELL
            parts.append(
                f'<rect x="{left:g}" y="{upper:g}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{colour}55"'
                f' stroke="{colour}"/>'
            )
    parts.append(text(middle, TOP + HEADS * CELL + 18, "tokens of one sequence →"))
    return parts


def exchange(at: int) -> list[str]:
    """Return the arrow from one grid to the next."""
    start, end = FIRST + at * STEP + TOKENS * CELL + 6, FIRST + (at + 1) * STEP - 8
    y = TOP + HEADS * CELL / 2
    return [
        f'<line x1="{start:g}" y1="{y:g}" x2="{end:g}" y2="{y:g}" stroke="#555555" stroke-width="1.6"'
        ' marker-end="url(#head)"/>',
        text((start + end) / 2, y - 8, "all-to-all", 'text-anchor="middle" fill="#555555"'),
    ]


def drawing() -> str:
    """Return the picture."""
    parts = [part for at, panel_of in enumerate(PANELS) for part in panel(at, *panel_of)]
    parts += [part for at in range(len(PANELS) - 1) for part in exchange(at)]
    middle = TOP + HEADS * CELL / 2
    turned = f'text-anchor="middle" transform="rotate(-90 24 {middle:g})"'
    parts.append(text(24, middle, "heads", turned))
    for rank, colour in enumerate(COLOURS):
        x = WIDTH / 2 - 90 + rank * 110
        parts.append(f'<rect x="{x:g}" y="216" width="14" height="14" rx="3" fill="{colour}55" stroke="{colour}"/>')
        parts.append(text(x + 22, 228, f"rank {rank}", 'text-anchor="start"'))
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#555555"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="13"><defs>{head}</defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
