"""Multi-token prediction under Trainer: it learns, and says what it learns."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import mtp_models as tiny_mtp
import pytest
import torch
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples

ROOT = Path(__file__).parents[2]
LENGTH = 48


def text(rows: int) -> Examples:
    """Return rows of English prose, a token a byte."""
    data = (ROOT / "LICENSE").read_bytes()[: rows * LENGTH]
    lines = [list(data[at : at + LENGTH]) for at in range(0, rows * LENGTH, LENGTH)]
    return Examples([{"input_ids": line, "labels": line} for line in lines])


def train(folder: Path, *words: str, rows: int = 64, **changes: Any) -> list[dict[str, float]]:
    """Train a tiny model with two depths, and return what Trainer logged."""
    set_torchturbo_args(parse_torchturbo_args(["--tt_enable_mtp", *words])[0])
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "max_steps": 60, "logging_steps": 10, "learning_rate": 5e-3, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "weight_decay": 0.1, "seed": 0,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **(settings | changes))
    model = tiny_mtp.model("deepseek_v3", num_nextn_predict_layers=2, vocab_size=256, initializer_range=0.02)
    trainer = TurboTrainer(model=model, args=args, train_dataset=text(rows), data_collator=Collator(0))
    trainer.train()
    logs: list[dict[str, float]] = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs


def frequencies(rows: int) -> float:
    """Return what a guess that knows how often each byte occurs, and nothing else, loses on the text."""
    data = (ROOT / "LICENSE").read_bytes()[: rows * LENGTH]
    shares = torch.tensor(list(data)).bincount().float() / len(data)
    return float(-(shares * shares.clamp(min=1e-9).log()).sum())


def test_every_depth_learns_to_predict_real_text(tmp_path: Path) -> None:
    """From a guess among 256 bytes to less than their frequencies tell: something of the text before is used."""
    logs = train(tmp_path, rows=8, max_steps=30, learning_rate=1e-2)
    first, last = logs[0], logs[-1]

    for name in ("mtp_1_loss", "mtp_2_loss"):
        assert first[name] > 3.5
        assert last[name] < 0.9 * frequencies(8)


def test_weight_zero_learns_nothing_of_the_depths(tmp_path: Path) -> None:
    """Their losses are logged all the same, and are no part of the loss."""
    logs = train(tmp_path, "--tt_mtp_loss_scaling_factor", "0", max_steps=4, logging_steps=2)

    assert all(entry["mtp_2_loss"] > 5 for entry in logs)
    assert logs[0]["loss"] < 6


@pytest.mark.parametrize("on", [True, False])
def test_the_log_tells_the_loss_of_each_depth_where_it_is_asked_to(on: bool, tmp_path: Path) -> None:
    """At info level, as often as Trainer logs; without it the metrics stand in Trainer's log alone."""
    lines: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("torchturbo")
    logger.addHandler(handler)
    try:
        logs = train(tmp_path, "--tt_mtp_log_loss", str(on).lower(), max_steps=2, logging_steps=1)
    finally:
        logger.removeHandler(handler)

    told = [line for line in lines if "mtp_1_loss" in line[1]]
    assert (2 if on else 0) == len(told)
    for (level, line), entry in zip(told, logs, strict=False):
        assert logging.INFO == level
        assert f"mtp_1_loss {entry['mtp_1_loss']:.4f}, mtp_2_loss {entry['mtp_2_loss']:.4f}" in line
    assert all(math.isfinite(entry["mtp_1_loss"]) for entry in logs)
