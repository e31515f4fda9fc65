"""A diffusion model under LLaMA-Factory itself: its own data and collators, padded and packed, and an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

WORDS = ("--tt_bd_block_size", "24", "--tt_cap_lambda", "0.01")


@pytest.fixture(scope="module")
def diffusing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tiny diffusion model."""
    return str(
        tiny.save(tmp_path_factory.mktemp("diffusing") / "model", "qwen3", is_diffusion_model=True, mask_token_id=310)
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": True}, {"neat_packing": True}, {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 2}],
    ids=["padded", "packed", "packed apart", "evaluated"],
)
def test_a_diffusion_model_learns(
    changes: dict[str, Any], settings: Callable[..., Path], engine: Any, diffusing: str, logged: list[str]
) -> None:
    """Its samples are cut to whole blocks, its loss falls, and CAP's is logged beside it."""
    path = settings(model_name_or_path=diffusing, max_steps=6, learning_rate=1e-2, **changes)
    done = engine(path, *WORDS)

    losses = [entry["loss"] for entry in done.history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    assert all("cap_loss" in entry for entry in done.history if "loss" in entry)
    assert any("cutoff_len 64" in line and "is rounded up to 72: whole blocks of 24 tokens" in line for line in logged)
    assert ("eval_strategy" in changes) == any("eval_loss" in entry for entry in done.history)


def test_what_it_lacks_is_told_before_its_weights(
    settings: Callable[..., Path], engine: Any, tmp_path: Path, error_lines: Callable[[], list[str]]
) -> None:
    """A mask token."""
    model = str(tiny.save(tmp_path / "model", "qwen3", is_diffusion_model=True))
    with pytest.raises(SystemExit):
        engine(settings(model_name_or_path=model), *WORDS)
    assert any("names a mask token (mask_token_id)" in line for line in error_lines())


def test_generation_token_by_token_is_refused(
    settings: Callable[..., Path], engine: Any, diffusing: str, error_lines: Callable[[], list[str]]
) -> None:
    """With what to do instead."""
    changes = {"do_train": False, "do_predict": True, "eval_dataset": "identity", "dataset": None, "max_steps": -1}
    path = settings(model_name_or_path=diffusing, predict_with_generate=True, **changes)
    with pytest.raises(SystemExit):
        engine(path, *WORDS)
    assert any("predict_with_generate: generation writes token by token" in line for line in error_lines())
