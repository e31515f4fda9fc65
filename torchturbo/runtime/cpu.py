"""The CPU runtime: gloo, torch's deterministic kernels as they are, memory from the operating system."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from torchturbo.runtime.base import Profiler

STATUS = Path("/proc/self/status")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class CpuRuntime:
    """The host's processor."""

    device_type = "cpu"
    distributed_backend = "gloo"
    default_card: str | None = None
    records_memory = False

    def available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def device_count(self) -> int:
        """Return 1: torch sees all cores as one device."""
        return 1

    def device_name(self) -> str:
        """Return the architecture and the number of threads torch computes with."""
        import torch

        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"

    def current_device(self) -> int:
        """Return 0: there is one."""
        return 0

    def use_device(self, index: int) -> None:
        """Return at once: there is one."""

    def supports_bf16(self) -> bool:
        """Return True: torch computes bfloat16 on every CPU, slowly where the hardware has no instruction for it."""
        return True

    def emulates_bf16(self) -> bool:
        """Return whether torch knows of no bfloat16 instruction of this processor (AMX or AVX-512 on x86)."""
        import torch

        features = torch.cpu.get_capabilities()
        return not any(value is True for name, value in features.items() if name.endswith("bf16"))

    def total_memory(self) -> int | None:
        """Return the memory of this machine, or of the container where that is less."""
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # Windows
            return None
        try:
            limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
        except OSError:
            return total
        return min(total, int(limit)) if limit.isdigit() else total  # "max": no limit

    def deterministic_environment(self) -> dict[str, str]:
        """Return nothing: torch's CPU kernels read no variable."""
        return {}

    def synchronize(self) -> None:
        """Return at once: torch computes on the CPU while the caller waits."""

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensor: it is there."""
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor: it is there."""
        return tensor

    def peak_memory(self) -> int | None:
        """Return the peak resident set of this process in bytes; ``getrusage`` is for systems without ``/proc``.

        Linux lets a process inherit the figure of ``getrusage`` from the one that started it.
        """
        try:
            lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS

    def record_memory(self, entries: int | None) -> None:
        """Raise: the CPU's allocator keeps no history; :mod:`torchturbo.observe.tracker` counts tensors instead."""
        raise RuntimeError("the CPU's allocator records no history")

    def dump_memory(self, path: Path) -> None:
        """Raise, see :meth:`record_memory`."""
        raise RuntimeError("the CPU's allocator records no history")

    def profiler_activities(self) -> tuple[str, ...]:
        """Return the host's operators alone."""
        return ("CPU",)

    def profiler(self) -> Profiler:
        """Return torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        return profile(activities=[getattr(ProfilerActivity, name) for name in self.profiler_activities()])


RUNTIME = CpuRuntime()
