"""The live keys of mtp: two values of each, and what the engine then does differently."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_models as tiny_mtp
from key_runs import flag, run

MTP = flag("mtp.enabled", True)


def ran(*words: str, folder: Path) -> Any:
    """Train a model whose configuration speaks of one head."""
    return run(folder, *words, model=tiny_mtp.model("glm4_moe", vocab_size=320))


def enabled(value: Any, folder: Path) -> Any:
    """Return whether there are heads, whether their loss is logged, and what the configuration says of them."""
    trainer = ran(*flag("mtp.enabled", value), folder=folder)
    heads = [name for name in trainer.model.state_dict() if name.startswith("mtp.")]
    return len(heads), "mtp_1_loss" in trainer.state.log_history[0], trainer.model.config.num_nextn_predict_layers


def weight(value: Any, folder: Path) -> Any:
    """Return the loss, and whether the heads are trained."""
    trainer = ran(*MTP, *flag("mtp.loss_scaling_factor", value), folder=folder)
    trained = {name for name, one in trainer.model.named_parameters() if one.requires_grad}
    return round(trainer.state.log_history[0]["loss"], 3), any(name.startswith("mtp.") for name in trained)


def told(value: Any, folder: Path) -> list[str]:
    """Return the lines of the log that tell the depth's loss."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchturbo")
    logger.addHandler(handler)
    try:
        logs = ran(*MTP, *flag("mtp.log_loss", value), folder=folder).state.log_history
    finally:
        logger.removeHandler(handler)
    assert all("mtp_1_loss" in entry for entry in logs[:2])  # the metric is there either way
    return [line for line in lines if "mtp_1_loss" in line]


CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "mtp.enabled": (True, False, enabled),
    "mtp.loss_scaling_factor": (0.5, 0.0, weight),
    "mtp.log_loss": (True, False, told),
}
