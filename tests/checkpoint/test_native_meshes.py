"""Checkpoints of sharded runs: bit-equal on the same mesh, the same numbers on another one, for AdamW and Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
from ranks import run_ranks

TOLERANCE = 1e-6
EP2, SP2_EP2 = ["--tt_ep_size", "2"], ["--tt_sp_size", "2", "--tt_ep_size", "2"]


def words(optimizer: str, plan: list[str]) -> list[str]:
    return [*plan, *(["--tt_optimizer", "muon"] if optimizer == "muon" else [])]


def native(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a native state, by DCP's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()
    }
    load(tensors, checkpoint_id=folder)
    return tensors


def assert_bit_equal(run: dict[str, Any]) -> None:
    """Hold a resumed run against the one that never stopped."""
    assert run["whole"]["history"] == run["resumed"]["history"]
    assert run["whole"]["weights"].keys() == run["resumed"]["weights"].keys()
    for name, tensor in run["whole"]["weights"].items():
        assert torch.equal(tensor, run["resumed"]["weights"][name]), name


def assert_loaded(folder: Path, loaded: dict[str, Any]) -> None:
    """What a rank gathered right after loading is what the files hold, bit for bit, and the rates go with it."""
    files = native(folder / "native")
    assert files.keys() == loaded["states"].keys()
    for name, tensor in files.items():
        assert torch.equal(tensor, loaded["states"][name]), name
    assert {(1e-3 / 2, 1e-3)} == set(loaded["rates"])


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for step, pair in expected["history"].items():
        assert pair == pytest.approx(found["history"][step], rel=TOLERANCE), step
    for name, tensor in expected["weights"].items():
        error = (found["weights"][name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert error <= TOLERANCE, (name, error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_of_two_ranks_goes_on_anywhere(optimizer: str, tmp_path: Path) -> None:
    """On the two bit for bit, on one and on four with sequences and experts divided by the same numbers."""
    out = tmp_path / "out"
    runs = run_ranks(2, mesh_runs.saved, str(out), words(optimizer, EP2), "qwen3_moe")
    for run in runs:
        assert_bit_equal(run)
        assert ["checkpoint-2", "checkpoint-4"] == run["names"]
    assert_loaded(out / "checkpoint-2", runs[0]["resumed"]["loaded"])
    for world_size, plan in ((1, []), (4, SP2_EP2)):
        for found in run_ranks(
            world_size, mesh_runs.resumed, str(tmp_path / str(world_size)), words(optimizer, plan), "qwen3_moe",
            str(out / "checkpoint-2"),
        ):  # fmt: skip
            assert_loaded(out / "checkpoint-2", found["loaded"])
            assert_same(runs[0]["whole"], found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_of_one_process_goes_on_on_two_ranks(optimizer: str, tmp_path: Path) -> None:
    """The format is the same one."""
    out = tmp_path / "out"
    (run,) = run_ranks(1, mesh_runs.saved, str(out), words(optimizer, []), "qwen3_moe")
    assert_bit_equal(run)
    for found in run_ranks(
        2, mesh_runs.resumed, str(tmp_path / "two"), words(optimizer, EP2), "qwen3_moe", str(out / "checkpoint-2")
    ):
        assert_loaded(out / "checkpoint-2", found["loaded"])
        assert_same(run["whole"], found)
