"""Resuming under LLaMA-Factory, which takes the newest checkpoint of output_dir by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchturbo.errors import ConfigError


@pytest.fixture
def saved(settings: Callable[..., Path], engine: Any) -> Callable[..., tuple[Path, Any]]:
    """Return a function that makes a run of four steps whose last two are forgotten again."""

    def make(**changes: Any) -> tuple[Path, Any]:
        path = settings(**{"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **changes})
        whole = engine(path)
        shutil.rmtree(whole.output / "checkpoint-4")
        return path, whole

    return make


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_goes_on_as_if_it_had_not_stopped(method: str, saved: Any, engine: Any) -> None:
    """Bit for bit, from the checkpoint that LLaMA-Factory finds; the record is in it."""
    path, whole = saved(finetuning_type=method)
    weights = (whole.output / ("adapter_model" if method == "lora" else "model")).with_suffix(".safetensors")
    expected = weights.read_bytes()
    checkpoint = whole.output / "checkpoint-2"
    assert (checkpoint / "torchturbo.yaml").is_file()
    assert json.loads((checkpoint / "torchturbo_run.json").read_text())["step"] == 2

    again = engine(path)

    assert whole.steps == again.steps
    assert expected == weights.read_bytes()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["learning_rate=1e-5"], "learning_rate"),
        (["cutoff_len=32"], "cutoff_len"),
        (["mask_history=true"], "mask_history"),
        (["--tt_gbs", "4"], "gbs"),
    ],
)
def test_another_run_is_told_apart(
    words: list[str], name: str, saved: Any, engine: Any, error_lines: Callable[[], list[str]]
) -> None:
    """LLaMA-Factory alone would skip samples, or keep the old rate, in silence; the name allows it."""
    path, _ = saved()
    error_lines()

    with pytest.raises(ConfigError):
        engine(path, *words)
    (line,) = [line for line in error_lines() if "was made with" in line]
    assert f": {name}: " in line

    assert sorted(engine(path, *words, "--tt_resume_allow", name).steps) == [1, 2, 3, 4]


def test_a_checkpoint_that_a_killed_run_had_moved_away(saved: Any, engine: Any) -> None:
    """It was being replaced by one of its name; LLaMA-Factory would begin anew."""
    from torchturbo.checkpoint.files import OUTGOING, staging_folder

    path, whole = saved()
    moved = staging_folder(whole.output) / f"checkpoint-2{OUTGOING}"
    moved.parent.mkdir()
    (whole.output / "checkpoint-2").rename(moved)
    (whole.output / "model.safetensors").unlink()

    assert whole.steps == engine(path).steps
    assert not moved.exists()


def test_a_damaged_checkpoint_is_passed_over(saved: Any, engine: Any, logged: list[str]) -> None:
    """LLaMA-Factory picks by the number alone."""
    path, whole = saved(save_steps=1)
    broken = whole.output / "checkpoint-3"
    (broken / "native" / ".metadata").write_bytes(b"cut off")

    assert whole.steps == engine(path).steps
    assert any(f"{broken} is passed over" in line for line in logged)


def test_no_whole_checkpoint_is_an_error_with_its_way_out(
    saved: Any, engine: Any, error_lines: Callable[[], list[str]]
) -> None:
    """It is not a run from the start in the old folder."""
    path, whole = saved()
    (whole.output / "checkpoint-2" / "native" / ".metadata").unlink()
    error_lines()

    with pytest.raises(ConfigError):
        engine(path)
    (line,) = error_lines()
    assert "no complete checkpoint" in line and "overwrite_output_dir: true" in line

    assert sorted(engine(path, "overwrite_output_dir=true").steps) == [1, 2, 3, 4]
