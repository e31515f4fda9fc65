"""Draws docs/assets/router-losses.svg: two layers that are skewed in opposite ways, and the losses of them.

Run it after a change: ``python docs/pictures/router_losses.py``. A test holds the committed file to it, and its figures
to the losses that training computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from svg import BLUE, FAINT, ORANGE, box, sheet, text

FILE = Path(__file__).parents[1] / "assets" / "router-losses.svg"
LAYERS = ((0.55, 0.25, 0.15, 0.05), (0.05, 0.15, 0.25, 0.55))
"""Share of the choices, and mean probability, of each of four experts in two layers."""
LEFT, TOP, STEP, HEIGHT, BAR = 46, 48, 250, 90, 34
TALLEST = max(value for share in LAYERS for value in share)


def balance(share: Sequence[float]) -> float:
    """Return E x sum of f_i P_i, with P_i as large as f_i: 1 where all experts get the same."""
    return len(share) * sum(value * value for value in share)


def pooled() -> list[float]:
    """Return the shares over both layers together."""
    return [sum(values) / len(LAYERS) for values in zip(*LAYERS, strict=True)]


def chart(at: int, title: str, share: Sequence[float], colour: str, strong: bool) -> list[str]:
    """Return the bars of four experts and the loss of them."""
    x = LEFT + at * STEP
    middle = x + 2 * (BAR + 8) - 4
    base = TOP + HEIGHT
    parts = [text(middle, 34, title, font_weight="bold")]
    for number, value in enumerate(share):
        left, height = x + number * (BAR + 8), value / TALLEST * HEIGHT
        parts.append(box(left, base - height, BAR, height, colour))
        parts.append(text(left + BAR / 2, base + 16, f"{value:.0%}".replace("%", " %"), font_size=11, fill=FAINT))
    even = base - HEIGHT / TALLEST / len(share)
    parts.append(
        f'<path d="M{x - 6:g} {even:g} H{x + 4 * (BAR + 8):g}" stroke="{FAINT}" stroke-dasharray="4 4" fill="none"/>'
    )
    parts.append(text(x + 4 * (BAR + 8) + 4, even + 4, "even", "start", font_size=11, fill=FAINT))
    weight = {"font_weight": "bold"} if strong else {"fill": FAINT}
    parts.append(text(middle, base + 42, f"{balance(share):.2f}", font_size=16, **weight))
    return parts


def drawing() -> str:
    """Return the picture."""
    parts = [
        *chart(0, "layer 0", LAYERS[0], BLUE, strong=True),
        *chart(1, "layer 1", LAYERS[1], BLUE, strong=True),
        *chart(2, "both in one pool", pooled(), ORANGE, strong=False),
    ]
    total = sum(balance(share) for share in LAYERS)
    y = TOP + HEIGHT + 72
    words = f"TorchTurbo adds the layers up: {total:.2f}, and {len(LAYERS)} where all experts get the same"
    parts.append(text(LEFT + (STEP + 4 * (BAR + 8)) / 2, y, words))
    parts.append(text(LEFT + 2 * STEP + 80, y, "the skews cancel", fill=FAINT))
    return sheet(760, y + 20, parts)


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
