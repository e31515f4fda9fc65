"""Device runtimes: each keeps the protocol, and the right one is chosen.

The CUDA runtime is held against torch.cuda with its functions replaced, and on a real device where there is one. The
NPU runtime is held against a stand-in for the documented surface of ``torch_npu``: no such device was at hand.
"""

from __future__ import annotations

import json
import pickle
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from ranks import run_ranks

from torchturbo.observe.peaks import CARDS
from torchturbo.runtime import Runtime, current_runtime
from torchturbo.runtime import cpu as cpu_module
from torchturbo.runtime.choice import RUNTIMES
from torchturbo.runtime.cpu import CpuRuntime
from torchturbo.runtime.cuda import CudaRuntime
from torchturbo.runtime.npu import NpuRuntime

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("name", RUNTIMES)
def test_each_runtime_has_all_of_the_protocol(name: str) -> None:
    """The engine asks nothing else of a device."""
    runtime = import_module(name).RUNTIME
    methods = [method for method, value in vars(Runtime).items() if not method.startswith("_") and callable(value)]

    assert len(methods) > 10
    assert all(callable(getattr(runtime, method)) for method in methods)
    assert all(hasattr(runtime, attribute) for attribute in get_type_hints(Runtime))
    assert runtime.default_card is None or runtime.default_card in CARDS


def test_the_cpu_is_always_there() -> None:
    """With figures that are its own."""
    runtime = current_runtime(use_cpu=True)

    assert (runtime.device_type, runtime.distributed_backend, runtime.available()) == ("cpu", "gloo", True)
    assert "threads" in runtime.device_name()
    assert runtime.device_count() == 1
    assert runtime.supports_bf16()
    assert (runtime.peak_memory() or 0) > 10_000_000
    assert runtime.profiler_activities() == ("CPU",)
    assert runtime.deterministic_environment() == {}


def peak_after_allocating(rank: int) -> tuple[int, int]:
    runtime = CpuRuntime()
    before = runtime.peak_memory() or 0
    held = torch.ones(50_000_000)
    assert held.nbytes == 200_000_000
    return before, runtime.peak_memory() or 0


def test_the_cpus_peak_is_the_processs() -> None:
    """In a process that has had no higher one: 200 MB more are 200 MB more."""
    ((before, after),) = run_ranks(1, peak_after_allocating)

    assert after - before == pytest.approx(200_000_000, rel=0.1)


@pytest.mark.parametrize("status", [None, "Name: python\n"])
def test_the_cpus_peak_without_proc(status: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Comes from getrusage, which says it in KiB, and on macOS in bytes; Windows has none."""
    if status is not None:
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(cpu_module, "STATUS", tmp_path / "status")
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=2048))

    assert CpuRuntime().peak_memory() == 2 << 20
    (tmp_path / "status").write_text("VmPeak: 9 kB\nVmHWM:\t    3072 kB\n")
    assert CpuRuntime().peak_memory() == 3 << 20
    (tmp_path / "status").unlink()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert CpuRuntime().peak_memory() == 2048
    monkeypatch.setitem(sys.modules, "resource", None)
    assert CpuRuntime().peak_memory() is None


def test_the_cpu_says_that_its_allocator_has_no_history(tmp_path: Path) -> None:
    """Who asks for it anyway made a mistake."""
    assert not CpuRuntime().records_memory
    for ask in (lambda: CpuRuntime().record_memory(1), lambda: CpuRuntime().dump_memory(tmp_path / "x")):
        with pytest.raises(RuntimeError, match="records no history"):
            ask()


def test_the_cpus_profiler_writes_a_trace(tmp_path: Path) -> None:
    """Of the operators that ran between start and stop."""
    profiler = CpuRuntime().profiler()
    profiler.start()
    torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_an_accelerator_wins_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Trainer chooses."""
    monkeypatch.setattr(CudaRuntime, "available", lambda self: True)

    assert current_runtime().device_type == "cuda"
    assert current_runtime(use_cpu=True).device_type == "cpu"


def test_cuda_says_what_determinism_needs() -> None:
    """Without it torch's strict mode raises at the first matrix product."""
    assert CudaRuntime().deterministic_environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_the_cpu_is_its_own_host() -> None:
    """A copy would only double what is held."""
    tensor = torch.ones(3)

    assert CpuRuntime().to_host(tensor) is CpuRuntime().to_device(tensor) is tensor


@pytest.mark.parametrize("runtime", [CudaRuntime(), NpuRuntime()], ids=lambda runtime: runtime.device_type)
def test_moves_are_asked_for_and_not_waited_for(
    runtime: Any, torch_npu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From and to page-locked memory, or the copy would wait; what is there already is written over."""
    asked: list[Any] = []

    class Moved(torch.Tensor):
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            asked.append(("copy", non_blocking))
            return super().copy_(source)

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            asked.append((str(device), non_blocking))
            return self

    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **kwargs: asked.append(kwargs) or empty_like(tensor))
    monkeypatch.setattr(torch, "device", lambda kind, index: f"{kind}:{index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    torch.npu.current_device = lambda: 3  # type: ignore[attr-defined]
    tensor = torch.ones(3).as_subclass(Moved)

    host = runtime.to_host(tensor)
    assert runtime.to_host(tensor * 2, host) is host
    assert [2.0] * 3 == host.tolist()
    runtime.to_device(host)
    assert [
        {"device": "cpu", "pin_memory": True}, ("copy", True), ("copy", True), (f"{runtime.device_type}:3", True),
    ] == asked  # fmt: skip


@gpu
@needs_gpu
def test_moves_of_a_real_cuda_device() -> None:
    """The values arrive, both ways, once somebody has waited; host memory is page-locked."""
    runtime = CudaRuntime()
    tensor = torch.randn(1000, 100, device="cuda")
    host = runtime.to_host(tensor)
    back = runtime.to_device(host)
    tensor.mul_(2)
    runtime.to_host(tensor, host)
    runtime.synchronize()

    assert host.is_pinned()
    assert (host.device.type, back.device.type) == ("cpu", "cuda")
    assert torch.equal(host, tensor.cpu())
    assert torch.equal(2 * back, tensor)


def test_cuda_asks_torch_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each figure from the function that has it."""
    calls: list[tuple[str, Any]] = []
    figures = {
        "max_memory_reserved": 4, "device_count": 8, "get_device_name": "NVIDIA H200", "is_available": True,
    }  # fmt: skip
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("synchronize", None)))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **asked: calls.append(("record", asked)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    runtime = CudaRuntime()

    assert (runtime.available(), runtime.device_count(), runtime.device_name()) == (True, 8, "NVIDIA H200")
    assert runtime.supports_bf16()
    assert runtime.peak_memory() == 4
    runtime.synchronize()
    runtime.record_memory(50)
    runtime.dump_memory(tmp_path / "a.pickle")
    runtime.record_memory(None)
    assert calls == [
        ("synchronize", None), ("record", {"max_entries": 50}),
        ("dump", str(tmp_path / "a.pickle")), ("record", {"enabled": None}),
    ]  # fmt: skip
    assert runtime.profiler_activities() == ("CPU", "CUDA")


@gpu
@needs_gpu
def test_a_real_cuda_device(tmp_path: Path) -> None:
    """Memory that is taken shows, in the figures and in the snapshot; kernels show in the trace."""
    runtime = CudaRuntime()
    runtime.record_memory(1000)
    before = runtime.peak_memory()
    profiler = runtime.profiler()
    profiler.start()
    held = torch.ones(1024, 1024, device="cuda")
    held @ held
    runtime.synchronize()
    profiler.stop()
    after = runtime.peak_memory()
    runtime.dump_memory(tmp_path / "snapshot.pickle")
    runtime.record_memory(None)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    assert before is not None and after is not None
    assert after >= max(before, 2 * held.nbytes)
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"]
    assert any(
        event.get("cat") == "kernel" for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    )


class StandInProfile:
    """What torch_npu.profiler.profile documents: start, stop, export_chrome_trace; no key_averages."""

    def __init__(self, activities: list[str]) -> None:
        self.activities = activities

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""

    def export_chrome_trace(self, path: str) -> None:
        """Write."""
        Path(path).write_text(json.dumps({"traceEvents": []}))


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install a stand-in for torch_npu and return the list of calls that it gets."""
    calls: list[Any] = []
    surface: Any = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 16,
        get_device_name=lambda: "Ascend910B2",
        is_bf16_supported=lambda: True,
        max_memory_reserved=lambda: 8,
        synchronize=lambda: calls.append("synchronize"),
        memory=SimpleNamespace(_record_memory_history=lambda **asked: calls.append(asked), _dump_snapshot=calls.append),
    )
    module: Any = ModuleType("torch_npu")
    module.__spec__ = SimpleNamespace(name="torch_npu")
    module.npu = surface
    module.profiler = SimpleNamespace(
        profile=StandInProfile, ProfilerActivity=SimpleNamespace(CPU="cpu activity", NPU="npu activity")
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", surface, raising=False)
    return calls


def test_npu_against_the_documented_surface_of_torch_npu(torch_npu: list[Any], tmp_path: Path) -> None:
    """Each figure from the function that is documented for it."""
    runtime = NpuRuntime()

    assert (runtime.available(), runtime.device_count(), runtime.device_name()) == (True, 16, "Ascend910B2")
    assert runtime.supports_bf16()
    assert runtime.peak_memory() == 8
    assert (runtime.distributed_backend, runtime.deterministic_environment()) == (
        "hccl", {"HCCL_DETERMINISTIC": "true"},
    )  # fmt: skip
    runtime.synchronize()
    runtime.record_memory(9)
    runtime.dump_memory(tmp_path / "a.pickle")
    runtime.record_memory(None)
    assert torch_npu == ["synchronize", {"max_entries": 9}, str(tmp_path / "a.pickle"), {"enabled": None}]


def test_npus_profiler_is_torch_npus_own(torch_npu: list[Any], tmp_path: Path) -> None:
    """With its own names of the activities."""
    profiler: Any = NpuRuntime().profiler()

    assert profiler.activities == ["cpu activity", "npu activity"]
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert json.loads((tmp_path / "t.json").read_text()) == {"traceEvents": []}


def test_npu_is_absent_without_torch_npu() -> None:
    """Asking does not import anything."""
    assert not NpuRuntime().available()
