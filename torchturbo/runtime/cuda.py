"""The CUDA runtime: nccl, cuBLAS workspaces for determinism, memory from torch's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from torchturbo.runtime.base import Profiler


class CudaRuntime:
    """An NVIDIA GPU."""

    device_type = "cuda"
    distributed_backend = "nccl"
    default_card: str | None = "h20"
    records_memory = True

    def available(self) -> bool:
        """Return whether torch sees a CUDA device."""
        import torch

        return torch.cuda.is_available()

    def device_count(self) -> int:
        """Return how many devices torch sees."""
        import torch

        return torch.cuda.device_count()

    def device_name(self) -> str:
        """Return the current device's marketing name."""
        import torch

        return torch.cuda.get_device_name()

    def current_device(self) -> int:
        """Return the index of this thread's device among those that the process sees."""
        import torch

        return torch.cuda.current_device()

    def use_device(self, index: int) -> None:
        """Make a device this thread's."""
        import torch

        torch.cuda.set_device(index)

    def supports_bf16(self) -> bool:
        """Return whether the device computes bfloat16 in hardware (Ampere and later); emulation does not count."""
        import torch

        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def emulates_bf16(self) -> bool:
        """Return False: a device without the instruction counts as one without the format."""
        return False

    def total_memory(self) -> int | None:
        """Return the current device's memory, what others hold of it included."""
        import torch

        return int(torch.cuda.mem_get_info()[1])

    def deterministic_environment(self) -> dict[str, str]:
        """Return cuBLAS's workspace setting, without which torch's strict mode raises at the first matrix product.

        Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        """
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def synchronize(self) -> None:
        """Wait for every stream of the current device."""
        import torch

        torch.cuda.synchronize()

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy a tensor into page-locked host memory, in the order of the current stream."""
        import torch

        if out is None:
            out = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return out.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of page-locked host memory to the current device, in the order of the current stream."""
        import torch

        return tensor.to(torch.device("cuda", torch.cuda.current_device()), non_blocking=True)

    def peak_memory(self) -> int | None:
        """Return the most bytes torch's allocator has reserved on the current device."""
        import torch

        return torch.cuda.max_memory_reserved()

    def record_memory(self, entries: int | None) -> None:
        """Switch the allocator's history on or off.

        Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
        """
        from torch.cuda import memory

        if entries is None:
            memory._record_memory_history(enabled=None)
        else:
            memory._record_memory_history(max_entries=entries)

    def dump_memory(self, path: Path) -> None:
        """Write the allocator's snapshot."""
        from torch.cuda import memory

        memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def profiler_activities(self) -> tuple[str, ...]:
        """Return the host's operators and the device's kernels."""
        return ("CPU", "CUDA")

    def profiler(self) -> Profiler:
        """Return torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        return profile(activities=[getattr(ProfilerActivity, name) for name in self.profiler_activities()])


RUNTIME = CudaRuntime()
