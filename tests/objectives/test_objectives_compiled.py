"""Objectives beside torch.compile: their terms and hooks stay out of what is compiled, and the run is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusing
import dspark_models
import mtp_models
import pytest
import tiny
from key_runs import run

MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "multi-token prediction": (lambda: mtp_models.model("glm4_moe", vocab_size=320), ["--tt_enable_mtp"]),
    "DSpark": (dspark_models.model, ["--tt_enable_mtp"]),
    "router losses": (lambda: tiny.model("qwen3_moe"), ["--tt_moe_aux_loss_coeff", "0.1"]),
    "block diffusion": (diffusing.model, ["--tt_cap_lambda", "2"]),
}


def logged(folder: Path, name: str, **changes: Any) -> list[dict[str, float]]:
    """Return the losses, norms and metrics of a run."""
    make, words = MODELS[name]
    history = run(folder, *words, model=make(), **changes).state.log_history[:-1]
    return [{key: value for key, value in entry.items() if "loss" in key or "norm" in key} for entry in history]


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_is_trained_alike(name: str, tmp_path: Path) -> None:
    """The graphs are run without a backend's kernels: what differs is what was traced."""
    plain = logged(tmp_path / "plain", name)
    compiled = logged(tmp_path / "compiled", name, torch_compile=True, torch_compile_backend="eager")

    assert len(plain) == len(compiled)
    for expected, found in zip(plain, compiled, strict=True):
        assert expected == pytest.approx(found, rel=1e-5)
