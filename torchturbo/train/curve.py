"""The loss curve: its points from a trainer's log, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchturbo.checkpoint.files import write_with
from torchturbo.logging import get_logger

Points = list[tuple[int, float]]
NAME = "loss_curve.png"
log = get_logger(__name__)


def loss_points(log_history: Sequence[Mapping[str, Any]], key: str = "loss") -> Points:
    """Return (optimizer step, loss) for each logged value of ``loss`` or ``eval_loss``, in order of steps."""
    return sorted((int(entry["step"]), float(entry[key])) for entry in log_history if key in entry and "step" in entry)


def terms(logs: Mapping[str, Any]) -> list[str]:
    """Return the names of the losses in a log that are added to the model's own."""
    return [name for name in logs if name.endswith("_loss") and not name.startswith(("eval_", "train_"))]


def smoothed(points: Points) -> Points:
    """Return the centred moving mean over about a tenth of a curve: no lag, and the ends use what is there."""
    half = max(1, len(points) // 20)
    result = []
    for at, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, at - half) : at + half + 1]]
        result.append((step, sum(near) / len(near)))
    return result


def write_curve(log_history: Sequence[Mapping[str, Any]], path: Path, title: str = "Training loss") -> Path | None:
    """Draw the curve as a PNG, as a whole or not at all; returns None where there is nothing to draw, or nothing to draw with."""
    points, evaluated = loss_points(log_history), loss_points(log_history, "eval_loss")
    if not points:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        log.warning_rank0("no loss curve: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    few = len(points) < 20
    axes.plot(
        *zip(*points, strict=True), color="#93b4d6", linewidth=1, marker="o" if few else "", markersize=3, label="loss"
    )
    if not few:
        axes.plot(*zip(*smoothed(points), strict=True), color="#1f4e8c", linewidth=2, label="loss, smoothed")
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True), color="#c8502a", linewidth=1.5, marker="o", markersize=4, label="evaluation"
        )
    if any(terms(entry) for entry in log_history):
        title += ", with its further terms"
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_with(path, figure.savefig)
    return path
