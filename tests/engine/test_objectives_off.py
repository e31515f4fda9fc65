"""With every objective off, a run is bit for bit that of the pipeline without their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch
from key_runs import run
from ranks import run_ranks

from torchturbo.engine import pipeline

OBJECTIVES = ("extra heads", "block diffusion", "multi-token prediction", "DSpark", "router losses")


def without_objectives() -> None:
    """Take their steps out of the pipeline of this process."""
    assert set(OBJECTIVES) <= {step.name for step in pipeline.STEPS}
    pipeline.STEPS = tuple(step for step in pipeline.STEPS if step.name not in OBJECTIVES)


def trained(folder: Path, kind: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return what a run logs that is no time, and the weights that it leaves."""
    trainer = run(folder, model=tiny.model(kind))
    logged = [{name: entry.get(name) for name in ("loss", "grad_norm")} for entry in trainer.state.log_history]
    return logged, dict(trainer.model.state_dict())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_one_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradient norms and weights."""
    logged, weights = trained(tmp_path / "with", kind)
    monkeypatch.setattr(pipeline, "STEPS", pipeline.STEPS)
    without_objectives()
    plain, others = trained(tmp_path / "without", kind)

    assert plain == logged
    assert others.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in others.items())


def step(rank: int, removed: bool) -> parity.Step:
    """Return one step of experts on two ranks that share sequences, with or without the steps."""
    if removed:
        without_objectives()
    model = tiny.model("qwen3_moe")
    engine = parity.prepared(model, parity.config(parallel_plan={"sp_size": 2, "ep_size": 2}), 2, rank)
    return parity.step(engine, model, parity.batches(2))


def test_two_ranks() -> None:
    """The same on a mesh."""
    found, expected = run_ranks(2, step, False)[0], run_ranks(2, step, True)[0]

    assert (expected.loss, expected.norm) == (found.loss, found.norm)
    assert all(torch.equal(gradient, found.gradients[name]) for name, gradient in expected.gradients.items())
