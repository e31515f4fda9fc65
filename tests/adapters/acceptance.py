"""The run that every layout repeats: eight rows a step, ragged labels, four steps, the same losses and norms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch

LENGTH, ROWS, STEPS = 16, 32, 4
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def rows() -> list[dict[str, list[int]]]:
    """Return rows of equal length, of which between one and fifteen tokens are targets; some have none."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for at in range(ROWS):
        ids = torch.randint(3, 320, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH if at % 7 == 3 else 1 + at % (LENGTH - 2)] = -100
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def trainer(folder: str, words: list[str], kind: str = "qwen3_moe", model: Any = None, **changes: Any) -> Any:
    """Return a trainer of the run; without words it is Hugging Face's own."""
    from transformers import Trainer, TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3,
        "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 5,
        "lr_scheduler_type": "linear",
    }  # fmt: skip
    set_torchturbo_args(parse_torchturbo_args(words)[0])
    if model is None:
        model = tiny.model(kind, **(EXPERTS if kind == "qwen3_moe" else {}))
    args = TrainingArguments(folder, **(settings | changes))
    kind_of_trainer = TurboTrainer if words else Trainer
    return kind_of_trainer(model=model, args=args, train_dataset=Examples(rows()), data_collator=Collator(0))


def history(made: Any) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm of each logged step."""
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry}


def run(
    rank: int,
    folder: str,
    words: list[str],
    kind: str = "qwen3_moe",
    resume: Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """Train on this rank and return the history."""
    made = trainer(folder, words, kind=kind, **(changes or {}))
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return history(made)


def stock(folder: Path, kind: str = "qwen3_moe") -> dict[int, tuple[float, float]]:
    """Return what Hugging Face's own Trainer makes of the run in one process."""
    made = trainer(str(folder), [], kind=kind, gradient_accumulation_steps=4)
    made.train()
    return history(made)
