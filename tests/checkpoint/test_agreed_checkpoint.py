"""Which checkpoint a resume means: one for all ranks, and the one that a killed run had moved out of the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
from ranks import run_ranks

from torchturbo.checkpoint import resume
from torchturbo.checkpoint.claims import Claims
from torchturbo.checkpoint.damage import STATE_NAME, Damage
from torchturbo.checkpoint.files import OUTGOING, recover, staging_folder
from torchturbo.errors import ConfigError

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def moved_away(out: Path, name: str) -> None:
    """Leave a checkpoint as a kill between the two renames of a save does."""
    staging_folder(out).mkdir(exist_ok=True)
    os.replace(out / name, staging_folder(out) / f"{name}{OUTGOING}")


def found(rank: int, out: str) -> list[str]:
    """Look for the newest checkpoint while the other rank sees other files; return what this rank goes on with."""
    told = []
    for blind, at in ((3, 1), (3, 0), (2, 1)):
        with pytest.MonkeyPatch.context() as patch:
            hidden = blind if rank == at else None
            patch.setattr(
                resume, "damage", lambda folder, n=hidden: Damage("short") if folder.name.endswith(f"-{n}") else None
            )
            told.append(str(resume.agreed_checkpoint(True, Path(out), "here")))
    return [text.replace(f"{out}/", "") for text in told]


def test_all_ranks_take_the_one_that_the_first_rank_found(tmp_path: Path) -> None:
    """It puts back what was moved away before it looks; what another rank can't read is that rank's problem."""
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / STATE_NAME).write_text("{}")
    moved_away(tmp_path, "checkpoint-3")

    first, second = run_ranks(2, found, str(tmp_path))

    assert ["checkpoint-3", "checkpoint-2", "checkpoint-3"] == first
    assert "here: checkpoint-3: short; use an older checkpoint" == second[0]
    assert ["checkpoint-2", "checkpoint-3"] == second[1:]


def resumed(rank: int, out: str) -> str:
    """Resume where the second rank can't read the newest checkpoint; return what ended it."""
    if rank == 1:
        resume.damage = lambda folder: Damage("short") if folder.name == "checkpoint-2" else None
    for step in (1, 2):
        (Path(out) / f"checkpoint-{step}").mkdir(exist_ok=True)
        (Path(out) / f"checkpoint-{step}" / STATE_NAME).write_text("{}")
    made = mesh_runs.trainer(out, [], "qwen3")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(resume, "damage", lambda folder: None)
        with pytest.raises(ConfigError) as caught:
            made.train(resume_from_checkpoint=True)
    return str(caught.value)


def test_ranks_that_see_other_files_all_stop(tmp_path: Path) -> None:
    """The second alone would go on from an older one, and wait for ever for the first."""
    expected = f"resume_from_checkpoint: {tmp_path}/checkpoint-2: short (rank 1)"
    assert all(expected in told for told in run_ranks(2, resumed, str(tmp_path)))


def test_a_checkpoint_that_was_being_replaced_is_resumed(tmp_path: Path) -> None:
    """The process ended between the two renames: no folder of that name is there when the next run looks."""
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()
    moved_away(tmp_path, "checkpoint-1")

    again = mesh_runs.trainer(str(tmp_path), ["--tt_resume_allow", "max_steps"], "qwen3", max_steps=2)
    again.train(resume_from_checkpoint=True)

    assert [2] == list(mesh_runs.history(again))[1:]
    assert (tmp_path / "checkpoint-1").is_dir()


def test_what_a_run_is_replacing_is_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does that itself, and another folder of the name would stop its own rename."""
    monkeypatch.setattr("torchturbo.checkpoint.files.PATIENCE", 0.0)
    (tmp_path / "checkpoint-1").mkdir()
    moved_away(tmp_path, "checkpoint-1")
    theirs = Claims()
    assert theirs.take(tmp_path)

    recover(tmp_path)
    assert not (tmp_path / "checkpoint-1").exists()
    theirs.release()
    recover(tmp_path)
    assert (tmp_path / "checkpoint-1").is_dir()
