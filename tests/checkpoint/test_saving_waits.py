"""Whom a save waits for, which is told once, and the device that the thread works on where it waits for nobody."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
from transformers import TrainerCallback
from transformers.integrations import MLflowCallback

from torchturbo.checkpoint import background
from torchturbo.runtime.cpu import CpuRuntime

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


class Duck:
    """A callback without the base class, which Trainer takes as well: it answers to the one event that it knows."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def late(found: list[bool]) -> TrainerCallback:
    """Return a callback whose ``on_save`` was set on it alone."""
    callback = TrainerCallback()
    callback.on_save = lambda args, state, control, **kwargs: Duck.on_save(holder, args, state, control)
    holder = Duck()
    holder.found = found
    return callback


@pytest.mark.parametrize("kind", ["a class of its own", "set on the object"])
def test_a_callback_of_any_kind_finds_the_checkpoint(kind: str, tmp_path: Path, logged: list[str]) -> None:
    """And the log says once for whom each save waits."""
    duck = Duck()
    callback: Any = duck if kind == "a class of its own" else late(duck.found)
    mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[callback], **SAVING, max_steps=2).train()

    assert [True, True] == duck.found
    told = [line for line in logged if "each save waits until the checkpoint is written" in line]
    assert [type(callback).__name__] == [line.rpartition("(on_save): ")[2] for line in told]


def test_a_tracker_that_uploads_checkpoints_is_waited_for(tmp_path: Path) -> None:
    """It is told of a save, and reads the folder then; what only listens to other events is not waited for."""
    made = mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[TrainerCallback()])
    assert [] == made._told_of_saves()
    made.callback_handler.callbacks.append(object.__new__(MLflowCallback))
    assert ["MLflowCallback"] == made._told_of_saves()


def test_a_checkpoint_is_written_on_the_device_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread works on the first device, where torch would open a context for every rank of the machine."""
    done: list[tuple[str, int]] = []
    write = background.write

    def use(self: CpuRuntime, index: int) -> None:
        done.append((threading.current_thread().name, index))

    def written(*args: Any) -> None:
        done.append((threading.current_thread().name, -1))
        write(*args)

    monkeypatch.setattr(
        CpuRuntime, "current_device", lambda self: 3 if threading.current_thread() is threading.main_thread() else 0
    )
    monkeypatch.setattr(CpuRuntime, "use_device", use)
    monkeypatch.setattr(background, "write", written)
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()

    assert [("checkpoint_0", 3), ("checkpoint_0", -1)] == done
