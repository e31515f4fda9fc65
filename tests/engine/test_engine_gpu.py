"""The engine on CUDA devices: parity with one process over nccl, and the limits of the benchmark."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import tiny
import torch
import torch.distributed as dist

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "engine.py"
TOLERANCE = 2e-5
"""Relative error in fp32: kernels choose another order of sums for other shapes."""
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"parallel_plan": {"sp_size": 2}}),
    ("llama", {"backend_config": {"cpu_offload": {"enabled": True}}}),
    ("llama", {"activation_checkpointing": {"enabled": True}}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"parallel_plan": {"ep_size": 2}}),
    ("qwen3_moe", {"parallel_plan": {"sp_size": 2, "ep_size": 2}}),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def compare(rank: int, world_size: int, device: str) -> None:
    """Hold a step of every layout against the plain model on the same device."""
    window = [{name: value.to(device) for name, value in batch.items()} for batch in parity.batches(4)]
    for kind, settings in LAYOUTS:
        plan = settings.get("parallel_plan", {})
        if max(plan.values(), default=1) > world_size:
            continue
        make = partial(made, kind, device)
        parity.check(rank, world_size, make, parity.config(**settings), window, TOLERANCE)


def made(kind: str, device: str) -> Any:
    return tiny.model(kind, **HEADS).to(device)


def over_nccl(rank: int, world_size: int, store: str) -> None:
    """Compare on a device of this rank's own, with a process group between devices for the one between processes."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    compare(rank, world_size, f"cuda:{rank}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_layout_equals_one_process(world_size: int, tmp_path: Path) -> None:
    if (here := torch.cuda.device_count()) < world_size:
        pytest.skip(f"{world_size} devices are needed, here is {here}")
    ranks.run_ranks(world_size, over_nccl, world_size, str(tmp_path / "store"))


def test_the_benchmark_keeps_its_limits() -> None:
    """Comparisons on two ranks are left out, and say so, where there is one device."""
    words = [sys.executable, str(BENCHMARK), "--device", "cuda", "--check", "--rounds", "20"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=3600)
    assert 0 == done.returncode, done.stdout + done.stderr
