"""The live keys of dspark: two values of each, and what the engine then does differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from key_runs import flag, run

SPEC = {
    "block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": 319, "markov_rank": 4,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip


def logged(path: str) -> Callable[[Any, Path], list[tuple[str, float]]]:
    """Return an observation of the draft's figures in the log of a run."""

    def observe(value: Any, folder: Path) -> list[tuple[str, float]]:
        model = tiny.model("qwen3", dspark_config=SPEC)
        trainer = run(folder, *flag("mtp.enabled", True), *flag(path, value), model=model)
        return [
            (name, figure)
            for log in trainer.state.log_history
            for name, figure in log.items()
            if name.startswith("dspark_") or name == "loss"
        ]

    return observe


CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "dspark.enabled": (True, False, logged("dspark.enabled")),
    "dspark.loss_scaling_factor": (1.0, 0.5, logged("dspark.loss_scaling_factor")),
    "dspark.num_anchors": (2, 5, logged("dspark.num_anchors")),
    "dspark.loss_decay_gamma": (4.0, 0.5, logged("dspark.loss_decay_gamma")),
    "dspark.ce_loss_alpha": (0.1, 0.7, logged("dspark.ce_loss_alpha")),
    "dspark.l1_loss_alpha": (0.9, 0.2, logged("dspark.l1_loss_alpha")),
    "dspark.confidence_loss_alpha": (1.0, 0.0, logged("dspark.confidence_loss_alpha")),
}
