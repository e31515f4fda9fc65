"""A small run that is saved on one mesh and resumed on another, with its weights and states gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

VOCABULARY = 321
"""Rows of the embeddings that no number of ranks divides."""
STEPS = 4
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "vocab_size": VOCABULARY},
    "qwen3": {"vocab_size": VOCABULARY},
}


def rows(count: int = 32, length: int = 16) -> list[dict[str, list[int]]]:
    """Return rows with between one and fifteen targets; some have none."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for at in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length if at % 7 == 3 else 1 + at % (length - 2)] = -100
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def arguments(folder: str, **changes: Any) -> Any:
    """Return the training arguments of a run of four steps."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3,
        "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 5,
        "weight_decay": 0.1, "lr_scheduler_type": "linear",
    }  # fmt: skip
    return TrainingArguments(folder, **(settings | changes))


def trainer(folder: str, words: list[str], kind: str = "qwen3_moe", model: Any = None, **changes: Any) -> Any:
    """Return a trainer of the run with the engine underneath."""
    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    options = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    set_torchturbo_args(parse_torchturbo_args(["--tt_gbs", "4", *words])[0])
    return TurboTrainer(
        model=tiny.model(kind, **SIZES[kind]) if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=Examples(rows()),
        data_collator=Collator(0),
        **options,
    )


def whole(tensor: Any) -> Tensor:
    """Return a plain copy of a tensor that may be sharded. A collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def weights(model: Any) -> dict[str, Tensor]:
    """Return a model's trained weights, gathered. A collective."""
    from torchturbo.engine.backends.fsdp2.shard import reshard

    reshard(model)
    return {name: whole(value) for name, value in model.named_parameters() if value.requires_grad}


def states(made: Any) -> dict[str, Tensor]:
    """Return everything a trainer's native state would hold, gathered. A collective."""
    from torchturbo.checkpoint.native import capture
    from torchturbo.engine.backends.fsdp2.shard import reshard

    reshard(made.model)
    optimizer = getattr(made.optimizer, "optimizer", made.optimizer)
    state = capture(made.model, optimizer)
    return {f"{part}.{name}": whole(value) for part, found in state.tensors.items() for name, value in found.items()}


def history(made: Any) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm of each logged step."""
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry}


class Loaded:
    """What a trainer had right after it loaded a checkpoint; a callback's ``on_train_begin`` comes then."""

    def __new__(cls, into: dict[str, Any]) -> Any:
        """Return the callback."""
        from transformers import TrainerCallback

        class Looking(TrainerCallback):  # type: ignore[misc]
            made: Any = None

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not into:
                    into.update(states=states(self.made), step=state.global_step)
                    into["rates"] = [(group["lr"], group["initial_lr"]) for group in self.made.optimizer.param_groups]

        return Looking()


def resumed(
    rank: int, folder: str, words: list[str], kind: str, checkpoint: str, model: Any = None, **changes: Any
) -> dict[str, Any]:
    """Go on from a checkpoint to the end: the history, what was loaded, and the weights at the end."""
    found: dict[str, Any] = {}
    look = Loaded(found)
    made = trainer(folder, words, kind, model, callbacks=[look], **changes)
    look.made = made
    made.train(resume_from_checkpoint=checkpoint)
    return {"history": history(made), "loaded": found, "weights": weights(made.model), "facts": made.turbo_run()}


def saved(rank: int, folder: str, words: list[str], kind: str, model: Any = None, **changes: Any) -> dict[str, Any]:
    """Train four steps with a checkpoint at step 2, then resume from it on the same mesh."""
    import copy

    again = copy.deepcopy(model)
    made = trainer(folder, words, kind, model, save_strategy="steps", save_steps=2, **changes)
    made.train()
    uninterrupted = {"history": history(made), "weights": weights(made.model)}
    second = resumed(rank, f"{folder}-again", words, kind, f"{folder}/checkpoint-2", again, **changes)
    return {"whole": uninterrupted, "resumed": second, "names": sorted(path.name for path in Path(folder).iterdir())}
