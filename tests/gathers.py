"""A record of the all-gathers of a sharded model: which unit had been reached when each was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class Trace:
    """Lines such as ``L0: L0 E0 L1``: when layer 0 was reached, these were gathered."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.lines: list[tuple[str, list[str]]] = []

    def reached(self, unit: str) -> None:
        self.lines.append((self.names.get(unit, unit), []))

    def gathered(self, unit: str) -> None:
        self.lines[-1][1].append(self.names.get(unit, unit))

    def __str__(self) -> str:
        return " | ".join(f"{unit}: {' '.join(gathers)}" for unit, gathers in self.lines if gathers)

    @property
    def gathers(self) -> list[str]:
        """Every gather, in order."""
        return [name for _, gathers in self.lines for name in gathers]


@contextmanager
def traced(names: dict[str, str]) -> Iterator[Trace]:
    """Record what FSDP2's parameter groups gather in this block; private parts of torch, so for tests alone."""
    trace = Trace(names)
    unshard, forward, backward = FSDPParamGroup.unshard, FSDPParamGroup.pre_forward, FSDPParamGroup.pre_backward

    def _unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._all_gather_result
        result = unshard(self, *args, **kwargs)
        if self._all_gather_result is not before:
            trace.gathered(self._module_fqn)
        return result

    def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace.reached(self._module_fqn)
        return forward(self, *args, **kwargs)

    def _backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace.reached(self._module_fqn)
        return backward(self, *args, **kwargs)

    patches: dict[str, Any] = {"unshard": _unshard, "pre_forward": _forward, "pre_backward": _backward}
    originals: dict[str, Any] = {"unshard": unshard, "pre_forward": forward, "pre_backward": backward}
    for name, function in patches.items():
        setattr(FSDPParamGroup, name, function)
    try:
        yield trace
    finally:
        for name, function in originals.items():
            setattr(FSDPParamGroup, name, function)
