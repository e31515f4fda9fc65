"""A finished run that is started again: the model it exports is the best one, where that was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file

from torchturbo.train.run import train


def test_the_best_model_stays_the_exported_one(tmp_path: Path, logged: list[str]) -> None:
    """It was the first checkpoint's, by a measure that falls; without that checkpoint the last one is taken, and told."""
    out, model, rows = tmp_path / "out", tmp_path / "model", tmp_path / "rows.jsonl"
    tiny.save(model)
    tiny.write_jsonl(rows, tiny.rows(8))
    words = [
        "--model_name_or_path", str(model), "--dataset", str(rows), "--eval_dataset", str(rows), "--output_dir", str(out),
        "--max_steps", "2", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1", "--use_cpu",
        "--learning_rate", "5e-3", "--per_device_train_batch_size", "2", "--load_best_model_at_end",
        "--metric_for_best_model", "eval_loss", "--greater_is_better", "true",
    ]  # fmt: skip
    assert str(out / "checkpoint-1") == train(words).trainer.state.best_model_checkpoint
    best = load_file(out / "model.safetensors")
    last = load_file(out / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(best[name], last[name]) for name in best)

    assert not train([*words, "--resume_from_checkpoint", "true"]).trained
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(best[name], again[name]) for name in best)

    shutil.rmtree(out / "checkpoint-1")
    train([*words, "--resume_from_checkpoint", "true"])
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(last[name], again[name]) for name in last)
    assert any("checkpoint-1, the best checkpoint, is gone: the model is the one of " in line for line in logged)
