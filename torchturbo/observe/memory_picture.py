"""Draws a memory timeline: bytes of live tensors by kind, stacked, with the peak and its split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchturbo.checkpoint.files import write_with
from torchturbo.logging import get_logger
from torchturbo.observe.size import unit as unit_of
from torchturbo.observe.tracker import KINDS, Moment, Summary

COLOURS = {
    "parameters": "#1f4e8c",
    "gradients": "#5b9bd5",
    "optimizer state": "#7a6bb0",
    "activations": "#e08a3c",
    "other": "#b8b8b8",
}
COLUMNS = 300
"""Stretches that the timeline is drawn in: each is wide enough to be seen."""
log = get_logger(__name__)


def draw(summary: Summary, path: Path, title: str) -> Path | None:
    """Draw the timeline as a PNG, as a whole or not at all; returns None where there is nothing to draw with."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.warning_rank0("no picture of the memory: matplotlib is not installed (pip install matplotlib)")
        return None
    unit, name = unit_of(summary.peak.total)
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = _columns(summary.timeline)
    at = [moment.operator for moment in shown]
    bands = [[moment.bytes[kind] / unit for moment in shown] for kind in KINDS]
    labels = [f"{kind}  {summary.peak.bytes[kind] / unit:.3g} {name}" for kind in KINDS]
    colours = [COLOURS[kind] for kind in KINDS]
    axes.stackplot(at, bands, labels=labels, colors=colours, step="post", linewidth=0)
    _mark_steps(axes, summary.timeline)
    _mark_peak(axes, summary.peak, unit, name)
    axes.set(title=title, xlabel="operators run", ylabel=f"live tensors ({name})")
    axes.set_xlim(at[0], at[-1] if at[-1] > at[0] else at[0] + 1)
    axes.set_ylim(0, summary.peak.total / unit * 1.15)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, texts = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], texts[::-1], loc="outside right upper", frameon=False, title="at the peak", alignment="left"
    )
    write_with(path, figure.savefig)
    return path


def _columns(timeline: list[Moment]) -> list[Moment]:
    """Return the fullest moment of each stretch that one column of the picture stands for.

    A peak that lasts for few operators would otherwise be thinner than a pixel.
    """
    first, last = timeline[0].operator, timeline[-1].operator
    width = max(1.0, (last - first) / COLUMNS)
    fullest: dict[int, Moment] = {}
    for moment in timeline:
        column = int((moment.operator - first) / width)
        if column not in fullest or moment.total > fullest[column].total:
            fullest[column] = moment
    columns = [moment._replace(operator=first + int(column * width)) for column, moment in fullest.items()]
    return [*columns, timeline[-1]]


def _mark_steps(axes: Any, timeline: list[Moment]) -> None:
    """Draw a line where a step begins, and name it."""
    before = None
    for moment in timeline:
        if moment.step != before:
            before = moment.step
            axes.axvline(moment.operator, color="#404040", linewidth=0.8, linestyle=":")
            axes.annotate(
                f" step {moment.step}", (moment.operator, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8
            )


def _mark_peak(axes: Any, peak: Moment, unit: int, name: str) -> None:
    """Point at the peak and give its size."""
    axes.plot([peak.operator], [peak.total / unit], marker="v", color="#202020", markersize=5)
    axes.annotate(
        f"peak {peak.total / unit:.3g} {name} ({peak.phase})",
        (peak.operator, peak.total / unit),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
