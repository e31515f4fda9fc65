"""Draws docs/assets/block-diffusion.svg: who sees whom in a doubled sequence of three blocks.

Run it after a change: ``python docs/pictures/block_diffusion.py``. A test holds the committed file to it, and the mask
in it to the one that training uses.
"""

from __future__ import annotations

from pathlib import Path

from svg import BLUE, FAINT, GREEN, ORANGE, box, grid, legend, sheet, text

FILE = Path(__file__).parents[1] / "assets" / "block-diffusion.svg"
LENGTH, BLOCK = 12, 4
PROMPT, MASKED = 3, (4, 6, 7, 9)
"""Tokens of the prompt, and positions that the noise hid."""
CELL, LEFT, TOP = 15, 210, 92


def kind(query: int, key: int) -> str | None:
    """Return the rule by which a query sees a key: both count from 0 to 2 x LENGTH, the clean half last."""
    noisy_query, noisy_key = query < LENGTH, key < LENGTH
    mine, its = (query % LENGTH) // BLOCK, (key % LENGTH) // BLOCK
    if noisy_query and noisy_key and mine == its:
        return "own"
    if noisy_query and not noisy_key and its < mine:
        return "before"
    if not noisy_query and not noisy_key and its <= mine:
        return "clean"
    return None


COLOURS = {"own": ORANGE, "before": BLUE, "clean": GREEN}
WORDS = {
    "own": "noisy sees its own noisy block",
    "before": "noisy sees the clean blocks before",
    "clean": "clean sees clean, up to its block",
}


def drawing() -> str:
    """Return the picture."""
    size = 2 * LENGTH
    parts = grid(LEFT, TOP, CELL, size, size, lambda query, key: COLOURS.get(kind(query, key) or ""))
    for half, (name, tokens) in enumerate((("noisy half", noisy()), ("clean half", clean()))):
        at = half * LENGTH * CELL
        middle = at + LENGTH * CELL / 2
        parts.append(text(LEFT + middle, 22, name, font_weight="bold"))
        parts.append(text(LEFT - 150, TOP + middle, name, "start", font_weight="bold"))
        for index, (filled, colour) in enumerate(tokens):
            parts.append(box(LEFT + at + index * CELL, 58, CELL - 2, CELL - 2, colour, strong=filled))
            parts.append(text(LEFT + at + index * CELL + 6.5, 52, str(index), font_size=9, fill=FAINT))
            parts.append(text(LEFT - 8, TOP + at + index * CELL + 10, str(index), "end", font_size=9, fill=FAINT))
    for block in range(1, size // BLOCK):
        place, width = block * BLOCK * CELL - 1, 1.6 if block * BLOCK == LENGTH else 0.5
        end = size * CELL - 2
        for line in (
            (LEFT + place, TOP, LEFT + place, TOP + end),
            (LEFT, TOP + place, LEFT + end, TOP + place),
        ):
            x1, y1, x2, y2 = line
            parts.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{FAINT}" stroke-width="{width:g}"/>')
    below = TOP + size * CELL + 14
    parts += legend(LEFT - 130, below, [(COLOURS[name], WORDS[name]) for name in COLOURS])
    parts += [
        box(LEFT + 180, below, 13, 13, ORANGE), text(LEFT + 200, below + 11, "answer, hidden by noise: the loss is here", "start"),
        box(LEFT + 180, below + 20, 13, 13, FAINT, strong=False), text(LEFT + 200, below + 31, "answer, seen as it is: no loss", "start"),
        box(LEFT + 180, below + 40, 13, 13, FAINT), text(LEFT + 200, below + 51, "prompt: never hidden", "start"),
        text(LEFT - 150, TOP + 24, "queries ↓", "start", fill=FAINT), text(LEFT - 150, 69, "keys →", "start", fill=FAINT),
    ]  # fmt: skip
    return sheet(760, below + 70, parts)


def noisy() -> list[tuple[bool, str]]:
    """Return the tokens of the noisy half: whether they are filled, and in which colour."""
    return [(index in MASKED or index < PROMPT, ORANGE if index in MASKED else FAINT) for index in range(LENGTH)]


def clean() -> list[tuple[bool, str]]:
    """Return the tokens of the clean half."""
    return [(index < PROMPT, FAINT) for index in range(LENGTH)]


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
