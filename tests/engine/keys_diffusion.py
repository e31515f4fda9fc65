"""The live keys of diffusion: two values of each, and what the engine then does differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from key_runs import flag, run

from torchturbo.plugins import Plugin, Run

HIDDEN = flag("diffusion.bd_mask_high", 1)


class Batches(Plugin):
    """Notes the micro-batches of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def step_begin(self, micro_batches: Any, run: Run) -> None:
        self.seen += micro_batches


def diffusing(folder: Path, *words: str) -> tuple[Any, Batches]:
    """Train a diffusion model for two steps."""
    batches = Batches()
    model = tiny.model("qwen3", is_diffusion_model=True, mask_token_id=1, pad_token_id=2)
    return run(folder, *words, model=model, plugins=[batches]), batches


def confidence(value: Any, folder: Path) -> bool:
    """Return whether CAP is logged."""
    trainer, _ = diffusing(folder, *flag("diffusion.cap_lambda", value))
    return "cap_loss" in trainer.state.log_history[0]


def hidden(path: str, *words: str) -> Callable[[Any, Path], int]:
    """Return an observation of how many tokens are hidden."""

    def observe(value: Any, folder: Path) -> int:
        _, batches = diffusing(folder, *words, *flag(path, value))
        return sum(int(batch["labels"].ne(-100).sum()) for batch in batches.seen)

    return observe


def length(value: Any, folder: Path) -> int:
    """Return how long a doubled sequence of ten tokens is."""
    _, batches = diffusing(folder, *flag("diffusion.bd_block_size", value))
    return int(batches.seen[0]["input_ids"].shape[1])


CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "diffusion.cap_lambda": (2.0, 0.0, confidence),
    "diffusion.bd_mask_low": (1, 0.1, hidden("diffusion.bd_mask_low", *HIDDEN)),
    "diffusion.bd_mask_high": (0.1, 1, hidden("diffusion.bd_mask_high", *flag("diffusion.bd_mask_low", 0))),
    "diffusion.bd_block_size": (4, 16, length),
}
