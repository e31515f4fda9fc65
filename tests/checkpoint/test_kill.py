"""A run that is killed at any moment of a save: the newest complete checkpoint loads, and holds what it should."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
from ranks import PRELOAD, run_ranks

from torchturbo.checkpoint import native
from torchturbo.checkpoint.damage import damage
from torchturbo.checkpoint.files import STAGING
from torchturbo.checkpoint.resume import agreed_checkpoint

DIGESTS = "digests"


def digest(model: Any) -> str:
    made = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        made.update(parameter.detach().contiguous().numpy().tobytes())
    return made.hexdigest()


def endless(folder: str, over: bool = False) -> None:
    """Train and save after every step, noting what the weights were, until somebody kills it.

    With ``over`` each save replaces the one before: the same first step again and again.
    """
    from transformers import TrainerCallback

    torch.set_num_threads(1)

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (Path(folder) / DIGESTS / str(state.global_step)).write_text(digest(kwargs["model"]))

    (Path(folder) / DIGESTS).mkdir(parents=True)
    while True:
        mesh_runs.trainer(
            folder, [], "qwen3", callbacks=[Noting()], save_strategy="steps", save_steps=1,
            max_steps=1 if over else 10_000, save_total_limit=3,
        ).train()  # fmt: skip


def goes_on(rank: int, folder: str) -> dict[str, Any]:
    """Resume from the newest whole checkpoint; return its step, whether its weights are the ones noted, and what is left."""
    seen: dict[str, Any] = {}

    from transformers import TrainerCallback

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.setdefault("digest", digest(kwargs["model"]))
            seen.setdefault("step", state.global_step)
            control.should_training_stop = True

    made = mesh_runs.trainer(folder, [], "qwen3", callbacks=[Looking()], save_strategy="no", max_steps=10_000)
    made.train(resume_from_checkpoint=True)
    noted = (Path(folder) / DIGESTS / str(seen["step"])).read_text()
    return {"step": seen["step"], "same": noted == seen["digest"], "staging": (Path(folder) / STAGING).exists()}


def killed(folder: Path, seconds: float, over: bool = False) -> None:
    """Start the endless run and kill it some time after its first checkpoint is there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=endless, args=(str(folder), over))
    process.start()
    limit = time.monotonic() + 60
    while not list(folder.glob("checkpoint-*/torchturbo_run.json")) and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(seconds)
    assert process.is_alive()
    process.kill()
    process.join()
    process.close()


def newest(folder: Path) -> Path:
    """Return the newest folder that is called a checkpoint, whole or not."""
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))


def loads(folder: Path) -> None:
    """Load the newest checkpoint, which must be whole, into a fresh model and its optimizer."""
    checkpoint = agreed_checkpoint(True, folder, "here")  # which a resume takes
    assert isinstance(checkpoint, Path), checkpoint
    assert newest(folder) == checkpoint
    assert damage(checkpoint) is None
    made = mesh_runs.trainer(str(folder), [], "qwen3")
    native.load_model(made.model, checkpoint / "native")
    native.load_optimizer(made.model, made.create_optimizer(), checkpoint / "native")
    assert (folder / DIGESTS / checkpoint.name.removeprefix("checkpoint-")).read_text() == digest(made.model)


def check(folder: Path, rounds: int, seed: int) -> None:
    moments = random.Random(seed)
    for at in range(rounds):
        killed(folder / str(at), moments.uniform(0.0, 1.5), over=at % 5 == 1)  # some save over an existing one
        if at < rounds - 1:
            loads(folder / str(at))
    (found,) = run_ranks(1, goes_on, str(folder / str(rounds - 1)))
    assert found["same"]
    assert not found["staging"]


def between(folder: str) -> None:
    """Save over a checkpoint and be killed between the two renames."""
    from torchturbo.checkpoint import files

    torch.set_num_threads(1)
    mesh_runs.trainer(folder, [], "qwen3", save_strategy="steps", save_steps=1, max_steps=1).train()
    replace = os.replace

    def stop(source: Any, place: Any) -> None:
        replace(source, place)
        if str(place).endswith(files.OUTGOING):
            os.kill(os.getpid(), signal.SIGKILL)

    files.os.replace = stop  # type: ignore[attr-defined]
    mesh_runs.trainer(folder, [], "qwen3", save_strategy="steps", save_steps=1, max_steps=1).train()


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    """Killed at the one moment when neither the old folder nor the new one has its name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=between, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert -signal.SIGKILL == process.exitcode
    assert [] == list(tmp_path.glob("checkpoint-*"))
    checkpoint = agreed_checkpoint(True, tmp_path, "here")
    assert tmp_path / "checkpoint-1" == checkpoint
    assert damage(tmp_path / "checkpoint-1") is None


@pytest.mark.timeout(300)
def test_the_newest_checkpoint_loads_after_a_kill(tmp_path: Path) -> None:
    """Five times, at moments that differ from run to run."""
    check(tmp_path, 5, seed=int.from_bytes(os.urandom(4), "little"))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_newest_checkpoint_loads_after_many_kills(tmp_path: Path) -> None:
    """Fifty times."""
    check(tmp_path, 50, seed=1)
