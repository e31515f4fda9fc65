"""Loss terms of plugins on two ranks and over micro-batches: the mean over the step's tokens, however they are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_runs import TERM, Gradients, command
from ranks import run_ranks

from torchturbo.train.run import train


def one_rank(rank: int, words: list[str]) -> dict[str, Any]:
    gradients = Gradients()
    result = train(words, quiet=True, callbacks=[gradients])
    history = [(entry["loss"], entry["Weighted"]) for entry in result.log_history if "loss" in entry]
    return {"history": history, "gradients": gradients.kept}


def test_a_weighted_loss_term_is_the_same_on_two_ranks(material: Path, tmp_path: Path) -> None:
    """Value and every gradient, with unequal tokens a row and accumulation 4 on one rank, 2 on two."""
    (tmp_path / "term.py").write_text(TERM)
    words = ["--tt_gbs", "4", "--max_grad_norm", "0", "--tt_plugin", str(tmp_path / "term.py")]
    (one,) = run_ranks(1, one_rank, command(material, tmp_path / "one", *words))
    two = run_ranks(2, one_rank, command(material, tmp_path / "two", *words))

    assert one["history"][0][1] > 1
    for rank in two:
        for expected, actual in zip(one["history"], rank["history"], strict=True):
            assert pytest.approx(expected, rel=1e-5) == actual
        for name, gradient in one["gradients"].items():
            error = (gradient - rank["gradients"][name]).norm() / gradient.norm().clamp(min=1e-6)
            assert error < 2e-6, name


def test_a_weighted_term_is_the_mean_over_all_tokens_of_a_step(material: Path, tmp_path: Path) -> None:
    """The oracle: the whole step's rows in one batch give the same loss as four micro-batches."""
    (tmp_path / "term.py").write_text(TERM)
    plugin = ["--tt_plugin", str(tmp_path / "term.py"), "--max_steps", "1", "--max_grad_norm", "0"]
    small = one_rank(0, command(material, tmp_path / "a", *plugin, "--tt_gbs", "4"))
    large = one_rank(0, command(material, tmp_path / "b", *plugin, "--per_device_train_batch_size", "8"))

    assert pytest.approx(large["history"][0], rel=1e-5) == small["history"][0]
    for name, gradient in large["gradients"].items():
        torch.testing.assert_close(small["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
