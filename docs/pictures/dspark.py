"""Draws docs/assets/dspark.svg: which features and slots the blocks of a draft see.

Run it after a change: ``python docs/pictures/dspark.py``. A test holds the committed file to it, and what is seen in it
to what training lets be seen.
"""

from __future__ import annotations

from pathlib import Path

from svg import BLUE, FAINT, GREEN, INK, ORANGE, box, grid, legend, sheet, text

FILE = Path(__file__).parents[1] / "assets" / "dspark.svg"
TARGETS = (0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1)
"""Which tokens of the sequence are trained on."""
ANCHORS, BLOCK = (2, 4, 8), 3
WINDOW = 4
"""Positions before an anchor that a sliding window lets through; DeepSeek-V4 has 128, a dense draft all."""
CELL, LEFT, TOP, GAP = 22, 176, 118, 1.6


def sees_feature(anchor: int, position: int, window: int | None) -> bool:
    """Return whether the slots of an anchor's block see the features of a position."""
    return position < anchor and (window is None or position >= anchor - window)


def counted(anchor: int, slot: int) -> bool:
    """Return whether a slot's prediction counts: every token up to the one it predicts is trained on."""
    end = anchor + 1 + slot
    return end < len(TARGETS) and all(TARGETS[anchor + 1 : end + 1])


def drawing() -> str:
    """Return the picture."""
    length, slots = len(TARGETS), len(ANCHORS) * BLOCK
    parts = [
        text(LEFT + length * CELL / 2, 26, "features of the model", font_weight="bold"),
        text(LEFT + (length + GAP) * CELL + slots * CELL / 2, 26, "slots of the blocks", font_weight="bold"),
        text(24, 73, "keys →", "start", fill=FAINT), text(24, TOP - 12, "queries ↓", "start", fill=FAINT),
    ]  # fmt: skip
    for position, target in enumerate(TARGETS):
        colour = GREEN if target else FAINT
        parts.append(text(LEFT + position * CELL + 10, 50, str(position), fill=FAINT))
        parts.append(
            box(
                LEFT + position * CELL, 58, CELL - 2, CELL - 2, colour, "a" if position in ANCHORS else "", bool(target)
            )
        )
    for row, anchor in enumerate(ANCHORS):
        at = LEFT + (length + GAP + row * BLOCK) * CELL
        middle = at + BLOCK * CELL / 2 - 1
        parts.append(text(middle, 50, f"block of {anchor}", font_size=11, fill=FAINT))
        for slot in range(BLOCK):
            name = f"x{anchor}" if slot == 0 else "·"
            parts.append(box(at + slot * CELL, 58, CELL - 2, CELL - 2, ORANGE, name, counted(anchor, slot)))
            y = TOP + (row * BLOCK + slot) * CELL
            word = f"x{anchor}" if slot == 0 else "mask"
            says = f"{word} → x{anchor + 1 + slot}" if counted(anchor, slot) else f"{word} → nothing"
            parts.append(text(LEFT - 10, y + 15, says, "end", fill=INK if counted(anchor, slot) else FAINT))
    parts += grid(
        LEFT,
        TOP,
        CELL,
        slots,
        length,
        lambda row, key: BLUE if sees_feature(ANCHORS[row // BLOCK], key, WINDOW) else None,
    )
    parts += grid(
        LEFT + (length + GAP) * CELL, TOP, CELL, slots, slots,
        lambda row, key: ORANGE if row // BLOCK == key // BLOCK else None,
    )  # fmt: skip
    below = TOP + slots * CELL + 14
    entries = (
        (GREEN, "token that is trained on; a: an anchor"),
        (BLUE, f"seen: features before the anchor, in a window of {WINDOW} (no window in a dense draft)"),
        (ORANGE, "seen: all slots of the own block"),
    )
    parts += legend(LEFT, below, entries)
    parts += [
        box(LEFT, below + 60, 13, 13, FAINT, strong=False), text(LEFT + 20, below + 71, "token that is not trained on", "start"),
        box(LEFT + 230, below + 60, 13, 13, ORANGE, strong=False),
        text(LEFT + 250, below + 71, "slot that does not count; ·: a mask", "start"),
    ]  # fmt: skip
    return sheet(760, below + 90, parts)


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
