"""Draws docs/assets/multi-token-prediction.svg: one depth, and what each depth predicts in two packed documents.

Run it after a change: ``python docs/pictures/multi_token_prediction.py``. A test holds the committed file to it, and the
targets in it to those that training computes.
"""

from __future__ import annotations

from pathlib import Path

from svg import BLUE, FAINT, GREEN, ORANGE, arrow, box, sheet, text

FILE = Path(__file__).parents[1] / "assets" / "multi-token-prediction.svg"
DOCUMENTS = (6, 4)
"""Tokens of each packed document."""
DEPTHS = 2
CELL, LEFT, TOP = 48, 232, 240
COLOURS = (BLUE, ORANGE)


def target(position: int, depth: int) -> int | None:
    """Return the position of the token that a depth predicts at a position; None where its document has ended."""
    start = 0
    for length in DOCUMENTS:
        if position < start + length:
            wanted = position + 1 + depth
            return wanted if wanted < start + length else None
        start += length
    return None


def drawing() -> str:
    """Return the picture."""
    return sheet(760, TOP + (DEPTHS + 2) * 34 + 34, [*flow(), *table()])


def flow() -> list[str]:
    """Return how a depth computes."""
    x, y = 216, 48
    return [
        text(24, 28, "depth k", "start", font_weight="bold"),
        text(24, y + 19, "states of depth k − 1, or of", "start"), text(24, y + 35, "the model after its last norm", "start"),
        text(24, y + 89, "embedding of the token", "start"), text(24, y + 105, "k positions ahead", "start"),
        arrow((x - 4, y + 24), (x + 18, y + 24)), arrow((x - 4, y + 94), (x + 18, y + 94)),
        box(x + 20, y + 8, 64, 32, GREEN, "norm"), box(x + 20, y + 78, 64, 32, GREEN, "norm"),
        arrow((x + 84, y + 24), (x + 100, y + 24), (x + 100, y + 46), (x + 116, y + 46)),
        arrow((x + 84, y + 94), (x + 100, y + 94), (x + 100, y + 72), (x + 116, y + 72)),
        box(x + 118, y + 36, 92, 46, GREEN, "projection"), arrow((x + 210, y + 59), (x + 228, y + 59)),
        box(x + 230, y + 36, 104, 46, GREEN, "decoder layer"), arrow((x + 334, y + 59), (x + 352, y + 59)),
        box(x + 354, y + 36, 56, 46, GREEN, "norm"), arrow((x + 410, y + 59), (x + 428, y + 59)),
        box(x + 430, y + 36, 98, 46, FAINT, "model’s head", strong=False),
        arrow((x + 420, y + 59), (x + 420, y + 104)), text(x + 420, y + 120, "to depth k + 1"),
        text(x + 479, y + 22, "loss k", fill=FAINT), arrow((x + 479, y + 36), (x + 479, y + 27)),
    ]  # fmt: skip


def table() -> list[str]:
    """Return the targets of the model and of each depth."""
    parts = [text(24, TOP - 38, "targets in two packed documents", "start", font_weight="bold")]
    total, start = sum(DOCUMENTS), 0
    parts.append(text(24, TOP + 18, "position", "start", fill=FAINT))
    for colour, length in zip(COLOURS, DOCUMENTS, strict=True):
        for index in range(length):
            parts.append(box(LEFT + (start + index) * CELL, TOP, CELL - 4, 28, colour, str(start + index)))
        start += length
    for depth in range(DEPTHS + 1):
        y = TOP + (depth + 1) * 34 + 6
        parts.append(text(24, y + 18, "the model predicts" if depth == 0 else f"depth {depth} predicts", "start"))
        for position in range(total):
            wanted = target(position, depth)
            colour = FAINT if wanted is None else COLOURS[position >= DOCUMENTS[0]]
            words = "–" if wanted is None else str(wanted)
            parts.append(box(LEFT + position * CELL, y, CELL - 4, 28, colour, words, strong=False))
    return parts


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
