"""A device that is not the host, for tests on a CPU: each move is recorded, and what was left behind is spoilt."""

from __future__ import annotations

from itertools import groupby

from torch import Tensor

from torchturbo.runtime.cpu import CpuRuntime


class Device(CpuRuntime):
    """Keeps host and device apart by the addresses of their tensors."""

    device_type = "cuda"
    distributed_backend = "nccl"

    def __init__(self) -> None:
        self.moves: list[tuple[str, int]] = []
        """Where to, and how many bytes, move by move."""
        self.synchronized = True
        self._host: dict[int, Tensor] = {}
        self._device: dict[int, Tensor] = {}

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy; what is read on the device after that is no number."""
        host = tensor.clone() if out is None else out.copy_(tensor)
        if self._device.pop(tensor.data_ptr(), None) is not None and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        self._host[host.data_ptr()] = host
        self.moves.append(("host", host.nbytes))
        self.synchronized = False
        return host

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy; what is read by the host until it comes back is no number."""
        assert self.is_host(tensor)
        copy = tensor.clone()
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        self._device[copy.data_ptr()] = copy
        self.moves.append(("device", copy.nbytes))
        return copy

    def synchronize(self) -> None:
        """Wait for the moves."""
        self.synchronized = True

    def is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory, on this rank, is the host's."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.numel() == 0 or local.data_ptr() in self._host

    def runs(self) -> list[int]:
        """Return the bytes of each run of moves to the device that none to the host interrupts."""
        return [sum(size for _, size in run) for to, run in groupby(self.moves, lambda move: move[0]) if to == "device"]

    def peak(self) -> int:
        """Return the most bytes that were on the device at once."""
        return max(self.runs())
