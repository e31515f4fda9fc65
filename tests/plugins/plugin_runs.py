"""The run that the tests of plugins train: its command line, a trainer of one's own, and what watches them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import tiny
import torch
from transformers import TrainerCallback, TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.plugins.load import load_plugins
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples

RECORDER = Path(__file__).with_name("recorder.py")

TERM = """\
from torchturbo.plugins import Plugin, register

class Term(Plugin):
    def loss_term(self, outputs, batch, run):
        targets = batch["labels"][:, 1:] != -100
        entropy = outputs["logits"][:, :-1].float().log_softmax(-1).square().mean(-1)[targets]
        return entropy.sum() if self.weighted else entropy.mean()

@register()
class Weighted(Term):
    weighted = True
    def loss_weight(self, batch, run):
        return (batch["labels"][:, 1:] != -100).sum()
"""
"""A plugin file with a loss term that is a mean over tokens."""


def command(material: Path | str, output: Path | str, *words: str, steps: int = 2) -> list[str]:
    """Return the words of a small training run; later words win over these."""
    return [
        "--model_name_or_path", f"{material}/model", "--dataset", f"{material}/rows.jsonl", "--output_dir", str(output),
        "--use_cpu", "--max_steps", str(steps), "--learning_rate", "5e-3", "--per_device_train_batch_size", "2",
        "--logging_steps", "1", *words,
    ]  # fmt: skip


def trainer(
    folder: Path, plugins: Any = None, changes: dict[str, Any] | None = None, kind: Any = TurboTrainer, **given: Any
) -> Any:
    """Return a trainer of one's own on a tiny model, with what the test says changed."""
    set_torchturbo_args(None)  # those of an earlier test's command line
    ids = torch.randint(3, 320, (8, 10), generator=torch.Generator().manual_seed(1)).tolist()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return kind(
        **{
            "model": tiny.model(),
            "args": TrainingArguments(str(folder), **(settings | (changes or {}))),
            "train_dataset": Examples([{"input_ids": row, "labels": row} for row in ids]),
            "data_collator": Collator(0),
            "turbo_plugins": plugins or (),
            **given,
        }
    )


def recorder() -> Any:
    """Return the recorder as a launch loads it, for a trainer that is told of it in code."""
    set_torchturbo_args(None)
    (made,), problems = load_plugins(
        build_from_args(parse_torchturbo_args(["--tt_plugin", str(RECORDER)])[0]), "hf_trainer"
    )
    assert not problems
    return made


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps every gradient of the first step; the optimizer has not moved yet."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.kept:
            base = getattr(model, "module", model)
            self.kept = {name: parity.whole(parameter.grad) for name, parameter in base.named_parameters()}
