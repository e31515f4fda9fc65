"""The NPU runtime (Huawei Ascend): hccl and the documented surface of ``torch_npu``, which registers ``torch.npu``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def _npu() -> Any:
    import torch
    import torch_npu  # type: ignore[import-not-found]  # noqa: F401  its import registers torch.npu

    return torch.npu  # type: ignore[attr-defined]


class NpuRuntime:
    """An Ascend NPU."""

    device_type = "npu"
    distributed_backend = "hccl"

    def available(self) -> bool:
        """Return whether ``torch_npu`` is installed and sees a device."""
        return find_spec("torch_npu") is not None and bool(_npu().is_available())

    def device_name(self) -> str:
        """Return the current device's own name."""
        return str(_npu().get_device_name())

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16 (910B and later)."""
        return bool(_npu().is_bf16_supported())

    def deterministic_environment(self) -> dict[str, str]:
        """Return HCCL's switch for reproducible reductions between devices.

        Source: https://www.hiascend.com/document (HCCL_DETERMINISTIC)
        """
        return {"HCCL_DETERMINISTIC": "true"}

    def peak_memory(self) -> int | None:
        """Return the most bytes the allocator has reserved on the current device."""
        return int(_npu().max_memory_reserved())


RUNTIME = NpuRuntime()
