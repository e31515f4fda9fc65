"""The live keys of routers: two values of each, and what the engine then does differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from key_runs import flag, run


def logged(path: str, metric: str) -> Callable[[Any, Path], Any]:
    """Return an observation of a metric of a run, and of what the coefficient adds to the loss."""

    def observe(value: Any, folder: Path) -> Any:
        logs = run(folder, *flag(path, value), model=tiny.model("qwen3_moe")).state.log_history
        return metric in logs[0], round(logs[0]["loss"], 3)

    return observe


CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "moe.aux_loss_coeff": (0.5, 0.0, logged("moe.aux_loss_coeff", "moe_aux_loss")),
    "moe.z_loss_coeff": (0.5, 0.25, logged("moe.z_loss_coeff", "moe_z_loss")),
}
