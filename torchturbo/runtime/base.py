"""The protocol every device runtime keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Profiler(AbstractContextManager["Profiler"], Protocol):
    """A profiler of one stretch of a run, as torch's and torch_npu's both are."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def stop(self) -> None:
        """Stop recording."""
        ...

    def export_chrome_trace(self, path: str) -> object:
        """Write what was recorded as a Chrome trace (JSON)."""
        ...


class Runtime(Protocol):
    """One kind of device, as the engine sees it."""

    device_type: str
    """torch's name of the device type: ``cpu``, ``cuda``, ``npu``."""
    distributed_backend: str
    """torch.distributed's backend for it: ``gloo``, ``nccl``, ``hccl``."""
    default_card: str | None
    """Row of the peak table (:mod:`torchturbo.observe.peaks`) assumed for a device without one; None: no peak at all."""
    records_memory: bool
    """Whether the device's allocator records its own history (:meth:`record_memory`)."""

    def available(self) -> bool:
        """Return whether this process can use such a device."""
        ...

    def device_count(self) -> int:
        """Return how many of them this process sees."""
        ...

    def device_name(self) -> str:
        """Return the device's own name, for people and for the peak table."""
        ...

    def current_device(self) -> int:
        """Return the index of the device that this thread works on."""
        ...

    def use_device(self, index: int) -> None:
        """Let this thread work on a device; a new thread works on the first one, whatever its process uses."""
        ...

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        ...

    def emulates_bf16(self) -> bool:
        """Return whether bfloat16 is slow here: computed, but without an instruction of the hardware for it."""
        ...

    def total_memory(self) -> int | None:
        """Return the bytes of memory that one device has, or None where that is not known."""
        ...

    def deterministic_environment(self) -> dict[str, str]:
        """Return the variables that deterministic algorithms need here, with the value to use where they are unset."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        ...

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a tensor's values in host memory, in ``out`` where that is given: an earlier result of this method.

        The copy may still be under way; :meth:`synchronize` waits for it. Where the host's memory is the device's own,
        nothing is copied, and the result is the tensor itself.
        """
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the values of what :meth:`to_host` returned on the device, for work that is given to it after this.

        The copy may still be under way: until then nothing but work of the device may write to the tensor.
        """
        ...

    def peak_memory(self) -> int | None:
        """Return the most bytes this process has held on the device so far, or None where that is not known.

        Of an accelerator what its allocator took, free blocks included; of the CPU the resident set of the process.
        """
        ...

    def record_memory(self, entries: int | None) -> None:
        """Record each allocation with its stack, the newest ``entries`` of them; None stops and forgets.

        Only where :attr:`records_memory` is true.
        """
        ...

    def dump_memory(self, path: Path) -> None:
        """Write what was recorded as a pickle for https://pytorch.org/memory_viz."""
        ...

    def profiler_activities(self) -> tuple[str, ...]:
        """Return the activities that a profile records, by the names of the profiler's ``ProfilerActivity``."""
        ...

    def profiler(self) -> Profiler:
        """Return a new profiler of all activities, not started."""
        ...
