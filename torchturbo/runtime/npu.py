"""The NPU runtime (Huawei Ascend): hccl and the documented surface of ``torch_npu``, which registers ``torch.npu``.

Source of the names: https://www.hiascend.com/document, Ascend Extension for PyTorch, API reference
(``torch_npu.npu`` mirrors ``torch.cuda``; ``torch_npu.profiler.profile`` has no ``key_averages``).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

    from torchturbo.runtime.base import Profiler


def _torch_npu() -> Any:
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu


def _npu() -> Any:
    import torch

    _torch_npu()  # its import registers torch.npu
    return torch.npu  # type: ignore[attr-defined]


class NpuRuntime:
    """An Ascend NPU."""

    device_type = "npu"
    distributed_backend = "hccl"
    default_card: str | None = "910c"
    records_memory = True

    def available(self) -> bool:
        """Return whether ``torch_npu`` is installed and sees a device."""
        return find_spec("torch_npu") is not None and bool(_npu().is_available())

    def device_count(self) -> int:
        """Return how many devices torch sees; a 910C package is two."""
        return int(_npu().device_count())

    def device_name(self) -> str:
        """Return the current device's own name."""
        return str(_npu().get_device_name())

    def current_device(self) -> int:
        """Return the index of this thread's device among those that the process sees."""
        return int(_npu().current_device())

    def use_device(self, index: int) -> None:
        """Make a device this thread's."""
        _npu().set_device(index)

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16 (910B and later)."""
        return bool(_npu().is_bf16_supported())

    def emulates_bf16(self) -> bool:
        """Return False: a device without the instruction counts as one without the format."""
        return False

    def total_memory(self) -> int | None:
        """Return the current device's memory, what others hold of it included."""
        return int(_npu().mem_get_info()[1])

    def deterministic_environment(self) -> dict[str, str]:
        """Return HCCL's switch for reproducible reductions between devices.

        Source: https://www.hiascend.com/document (HCCL_DETERMINISTIC)
        """
        return {"HCCL_DETERMINISTIC": "true"}

    def synchronize(self) -> None:
        """Wait for every stream of the current device."""
        _npu().synchronize()

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy a tensor into page-locked host memory, in the order of the current stream."""
        import torch

        if out is None:
            out = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return out.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of page-locked host memory to the current device, in the order of the current stream."""
        import torch

        return tensor.to(torch.device("npu", _npu().current_device()), non_blocking=True)

    def peak_memory(self) -> int | None:
        """Return the most bytes the allocator has reserved on the current device."""
        return int(_npu().max_memory_reserved())

    def record_memory(self, entries: int | None) -> None:
        """Switch the allocator's history on or off."""
        memory = _torch_npu().npu.memory
        if entries is None:
            memory._record_memory_history(enabled=None)
        else:
            memory._record_memory_history(max_entries=entries)

    def dump_memory(self, path: Path) -> None:
        """Write the allocator's snapshot."""
        _torch_npu().npu.memory._dump_snapshot(str(path))

    def profiler_activities(self) -> tuple[str, ...]:
        """Return the host's operators and the device's tasks."""
        return ("CPU", "NPU")

    def profiler(self) -> Profiler:
        """Return ``torch_npu``'s own profiler: torch's does not know the device."""
        profiler = _torch_npu().profiler
        activities = [getattr(profiler.ProfilerActivity, name) for name in self.profiler_activities()]
        return cast("Profiler", profiler.profile(activities=activities))


RUNTIME = NpuRuntime()
