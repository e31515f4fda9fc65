"""Draw the picture of the FSDP2 guide from the real prefetch lists: ``python tests/docs/prefetch_picture.py``.

Four layers with experts run forward on one rank under expert parallelism. Durations are made up; what is asked for
when is not, and the rest follows: one gather at a time, in the order asked for, and a unit computes when it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torchturbo.engine.backends.fsdp2.prefetch import Layer, Prefetch, prefetch_lists

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "prefetch.svg"
LAYERS = [Layer(f"L{at}", (f"E{at}",)) for at in range(4)]
UNITS = [name for layer in LAYERS for name in (layer.name, *layer.experts)]
COMPUTE, GATHER = {"L": 24, "E": 40}, {"L": 8, "E": 34}
LEFT, ROW, TOP = 118, 24, 34
COLOURS = {"L": "#4f6bd8", "E": "#c9683c"}


class Bar(NamedTuple):
    """What happens to a unit between two moments."""

    unit: str
    start: float
    end: float


def timeline(lists: dict[str, Prefetch]) -> tuple[list[Bar], list[Bar]]:
    """Return the gathers and the computations of one forward pass."""
    gathers: dict[str, Bar] = {}
    computed: list[Bar] = []
    free = now = 0.0
    for unit in UNITS:
        for target in (unit, *lists[unit].forward):
            if target not in gathers:
                start = max(free, now)
                free = start + GATHER[target[0]]
                gathers[target] = Bar(target, start, free)
            if target == unit:
                now = max(now, gathers[unit].end)
        computed.append(Bar(unit, now, now + COMPUTE[unit[0]]))
        now = computed[-1].end
    return list(gathers.values()), computed


def native() -> dict[str, Prefetch]:
    """Return lists that come to what FSDP2 does by itself here: the host waits for each layer's routing.

    So the next layer's gather is asked for when the experts compute, and theirs when the layer does.
    """
    after = dict(zip(UNITS, UNITS[1:], strict=False))
    return {unit: Prefetch((after[unit],) if unit in after else ()) for unit in UNITS}


def drawn() -> str:
    """Return the picture as SVG."""
    cases = {"native": native()}
    cases |= {name: prefetch_lists(LAYERS, name, "forward", 1, 1) for name in ("expert_with_layer", "expert_lookahead")}
    lines = []
    for at, (name, lists) in enumerate(cases.items()):
        gathers, computed = timeline(lists)
        top = TOP + at * (4 * ROW + 12)
        ends = {bar.unit: bar.end for bar in computed}
        held = [Bar(bar.unit, bar.start, ends[bar.unit]) for bar in gathers if bar.unit.startswith("E")]
        lines.append(f'<text x="8" y="{top - 6}" font-weight="bold">{name}</text>')
        for row, (title, bars) in enumerate((("gathers", gathers), ("computes", computed))):
            y = top + row * ROW
            lines.append(f'<text x="8" y="{y + 15}" fill="#555555">{title}</text>')
            lines += [_box(bar, y, ROW - 4) for bar in bars]
        y = top + 2 * ROW
        lines.append(f'<text x="8" y="{y + 15}" fill="#555555">experts held</text>')
        lines += [_box(bar, y + 11 * (number % 2), 9, text=False) for number, bar in enumerate(held)]
    height = TOP + 3 * (4 * ROW + 12) + 20
    lines += _foot(height - 14)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="760" height="{height}" rx="8" fill="#ffffff"/>', *lines, "</svg>", ""])


def _foot(y: int) -> list[str]:
    """Return the legend and the arrow of time, on one line."""
    lines = []
    for x, kind, says in ((LEFT, "L", "a layer without its experts"), (LEFT + 210, "E", "a layer's experts")):
        colour = COLOURS[kind]
        lines.append(
            f'<rect x="{x}" y="{y - 12}" width="18" height="16" rx="3" fill="{colour}33" stroke="{colour}"/>'
            f'<text x="{x + 9}" y="{y}" text-anchor="middle">{kind}</text><text x="{x + 25}" y="{y}">{says}</text>'
        )
    return [
        *lines,
        f'<text x="640" y="{y}" text-anchor="end" fill="#555555">time</text>'
        f'<path d="M648 {y - 4} H740 m-8 -5 l8 5 l-8 5" fill="none" stroke="#555555" stroke-width="1.6"/>',
    ]


def _box(bar: Bar, y: float, height: float, *, text: bool = True) -> str:
    scale = 2.05
    x, width, colour = LEFT + scale * bar.start, scale * (bar.end - bar.start), COLOURS[bar.unit[0]]
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3" fill="{colour}33" stroke="{colour}"/>'
    )
    label = f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">{bar.unit}</text>'
    return box + (label if text else "")


if __name__ == "__main__":
    PICTURE.write_text(drawn(), "utf-8")
