"""The CUDA runtime: nccl, cuBLAS workspaces for determinism, memory from torch's allocator."""

from __future__ import annotations


class CudaRuntime:
    """An NVIDIA GPU."""

    device_type = "cuda"
    distributed_backend = "nccl"

    def available(self) -> bool:
        """Return whether torch sees a CUDA device."""
        import torch

        return torch.cuda.is_available()

    def device_name(self) -> str:
        """Return the current device's marketing name."""
        import torch

        return torch.cuda.get_device_name()

    def supports_bf16(self) -> bool:
        """Return whether the device computes bfloat16 in hardware (Ampere and later); emulation does not count."""
        import torch

        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def deterministic_environment(self) -> dict[str, str]:
        """Return cuBLAS's workspace setting, without which torch's strict mode raises at the first matrix product.

        Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        """
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def peak_memory(self) -> int | None:
        """Return the most bytes torch's allocator has reserved on the current device."""
        import torch

        return torch.cuda.max_memory_reserved()


RUNTIME = CudaRuntime()
