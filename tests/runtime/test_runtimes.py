"""Device runtimes: each keeps the protocol, and the right one is chosen."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch

from torchturbo.runtime import Runtime, current_runtime
from torchturbo.runtime.base import RUNTIMES
from torchturbo.runtime.cuda import CudaRuntime
from torchturbo.runtime.npu import NpuRuntime


@pytest.mark.parametrize("name", RUNTIMES)
def test_each_runtime_has_all_of_the_protocol(name: str) -> None:
    """The engine asks nothing else of a device."""
    runtime = import_module(name).RUNTIME
    methods = [method for method in vars(Runtime) if not method.startswith("_")]

    assert all(callable(getattr(runtime, method)) for method in methods)
    assert all(isinstance(getattr(runtime, attribute), str) for attribute in get_type_hints(Runtime))


def test_the_cpu_is_always_there() -> None:
    """With figures that are its own."""
    runtime = current_runtime(use_cpu=True)

    assert (runtime.device_type, runtime.distributed_backend, runtime.available()) == ("cpu", "gloo", True)
    assert "threads" in runtime.device_name()
    assert runtime.supports_bf16()
    assert (runtime.peak_memory() or 0) > 10_000_000


def test_an_accelerator_wins_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Trainer chooses."""
    monkeypatch.setattr(CudaRuntime, "available", lambda self: True)

    assert current_runtime().device_type == "cuda"
    assert current_runtime(use_cpu=True).device_type == "cpu"


def test_cuda_says_what_determinism_needs() -> None:
    """Without it torch's strict mode raises at the first matrix product."""
    assert CudaRuntime().deterministic_environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_npu_against_the_documented_surface_of_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch_npu: no such device was at hand."""
    surface: Any = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda: "Ascend910B2",
        is_bf16_supported=lambda: True,
        max_memory_reserved=lambda: 7,
    )
    module = ModuleType("torch_npu")
    module.__spec__ = SimpleNamespace(name="torch_npu")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", surface, raising=False)
    runtime = NpuRuntime()

    assert (runtime.available(), runtime.device_name(), runtime.supports_bf16(), runtime.peak_memory()) == (
        True, "Ascend910B2", True, 7,
    )  # fmt: skip
    assert runtime.distributed_backend == "hccl"


def test_npu_is_absent_without_torch_npu() -> None:
    """Asking does not import anything."""
    assert not NpuRuntime().available()
