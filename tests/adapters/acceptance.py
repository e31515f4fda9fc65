"""The run that every layout repeats: eight rows a step, ragged labels, four steps, the same losses and norms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from torch.nn import functional
from transformers import Trainer

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


def trainer(
    folder: str, words: list[str], kind: str = "qwen3_moe", model: Any = None, own: str = "", **changes: Any
) -> Any:
    """Return a trainer of the run; without words it is Hugging Face's own."""
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import turbo
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
    base = Penalised if own == "compute_loss" else Trainer
    more = {"compute_loss_func": summed_loss} if own == "compute_loss_func" else {}
    made = turbo(base) if words else base
    return made(model=model, args=args, train_dataset=Examples(rows()), data_collator=Collator(0), **more)


class Penalised(Trainer):  # type: ignore[misc]
    """A trainer of the user's own, which adds to the loss and expects a mean over the ranks."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Add the mean square of the logits."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 5.0 * outputs.logits.float().pow(2).mean() / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def summed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss of the user's own: a sum over this rank's targets by the number of all."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


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


def stock(folder: Path, kind: str = "qwen3_moe", **changes: Any) -> dict[int, tuple[float, float]]:
    """Return what Hugging Face's own Trainer makes of the run in one process."""
    made = trainer(str(folder), [], kind=kind, gradient_accumulation_steps=4, **changes)
    made.train()
    return history(made)
