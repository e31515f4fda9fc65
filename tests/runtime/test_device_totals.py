"""What a device has: its memory, and whether bfloat16 is fast on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchturbo.runtime import cpu
from torchturbo.runtime.cpu import CpuRuntime
from torchturbo.runtime.cuda import CudaRuntime
from torchturbo.runtime.npu import NpuRuntime


def test_a_machine_has_its_memory_or_its_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of the two; `max` is no limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cpu, "CGROUP_LIMIT", limit)

    assert machine == CpuRuntime().total_memory()
    limit.write_text("max\n")
    assert machine == CpuRuntime().total_memory()
    limit.write_text("1048576\n")
    assert 1048576 == CpuRuntime().total_memory()


def test_an_accelerator_has_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second figure of `mem_get_info`, free memory being the first; the NPU's package is a stand-in."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", SimpleNamespace(mem_get_info=lambda: (2, 64)), raising=False)

    assert (80, 64) == (CudaRuntime().total_memory(), NpuRuntime().total_memory())
    assert (False, False) == (CudaRuntime().emulates_bf16(), NpuRuntime().emulates_bf16())


@pytest.mark.parametrize(
    ("features", "emulated"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"avx512_bf16": False, "amx_bf16": False, "num_logical_cores": 2}, True),
        ({"bf16": True}, False),
    ],
)
def test_bf16_is_slow_where_the_processor_has_no_instruction(
    features: dict[str, Any], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own list of what the processor can do."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)

    assert emulated == CpuRuntime().emulates_bf16()
