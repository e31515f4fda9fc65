"""Two steps of a tiny run with a key set, for the tests that look at what a key does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.steps.determinism import restored_determinism
from torchturbo.generated.keys import KEYS
from torchturbo.plugins import Plugin
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples


def rows(count: int = 8) -> Examples:
    ids = torch.randint(3, 320, (count, 10), generator=torch.Generator().manual_seed(1)).tolist()
    return Examples([{"input_ids": row, "labels": row} for row in ids])


def run(
    folder: Path,
    *words: str,
    model: Any = None,
    plugins: list[Plugin] | None = None,
    resume: bool = False,
    **changes: Any,
) -> Any:
    """Train for two steps of one row and return the trainer."""
    set_torchturbo_args(parse_torchturbo_args(words)[0])
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1, "max_steps": 2, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **(settings | changes))
    model = tiny.model() if model is None else model
    with restored_determinism():
        trainer = TurboTrainer(
            model=model, args=args, train_dataset=rows(), data_collator=Collator(0), turbo_plugins=plugins or ()
        )
        trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def flag(path: str, value: Any) -> list[str]:
    """Return the words that set a key to a value, on the command line."""
    return [str(KEYS[path].cli), str(value).lower() if isinstance(value, bool) else str(value)]
