"""The CPU runtime: gloo, torch's deterministic kernels as they are, memory from the operating system."""

from __future__ import annotations

import platform
import sys


class CpuRuntime:
    """The host's processor."""

    device_type = "cpu"
    distributed_backend = "gloo"

    def available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def device_name(self) -> str:
        """Return the architecture and the number of threads torch computes with."""
        import torch

        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"

    def supports_bf16(self) -> bool:
        """Return True: torch computes bfloat16 on every CPU, slowly where the hardware has no instruction for it."""
        return True

    def deterministic_environment(self) -> dict[str, str]:
        """Return nothing: torch's CPU kernels read no variable."""
        return {}

    def peak_memory(self) -> int | None:
        """Return the peak resident set of this process in bytes."""
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


RUNTIME = CpuRuntime()
