"""The protocol every device runtime keeps, and the choice of the one this process runs on."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol


class Runtime(Protocol):
    """One kind of device, as the engine sees it."""

    device_type: str
    """torch's name of the device type: ``cpu``, ``cuda``, ``npu``."""
    distributed_backend: str
    """torch.distributed's backend for it: ``gloo``, ``nccl``, ``hccl``."""

    def available(self) -> bool:
        """Return whether this process can use such a device."""
        ...

    def device_name(self) -> str:
        """Return the device's own name, for people."""
        ...

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        ...

    def deterministic_environment(self) -> dict[str, str]:
        """Return the variables that deterministic algorithms need here, with the value to use where they are unset."""
        ...

    def peak_memory(self) -> int | None:
        """Return the most bytes this process has held on the device, or None where that is not known."""
        ...


RUNTIMES = ("torchturbo.runtime.cuda", "torchturbo.runtime.npu", "torchturbo.runtime.cpu")
"""Modules that hold a ``RUNTIME``, the first available one wins; the CPU is always there."""


def current_runtime(*, use_cpu: bool = False) -> Runtime:
    """Return the runtime of this process: an accelerator where there is one, unless the CPU is asked for."""
    if not use_cpu:
        for name in RUNTIMES:
            runtime: Runtime = import_module(name).RUNTIME
            if runtime.available():
                return runtime
    from torchturbo.runtime.cpu import RUNTIME

    return RUNTIME
