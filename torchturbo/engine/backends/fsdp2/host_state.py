"""An optimizer whose state is in host memory between steps, for some of its parameters.

Within a step that state comes to the device a bucket at a time, is stepped there by the optimizer's own code, and goes
back. It is the same arithmetic on the same device, so the weights are those of the optimizer by itself, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torchturbo.runtime import Runtime

BUCKET = 256 * 2**20
"""Bytes of state that are brought to the device at once; a parameter with more comes alone."""


def keep_in_host_memory(optimizer: Optimizer, chosen: Mapping[Tensor, int], runtime: Runtime) -> Optimizer:
    """Let an optimizer keep the state of some of its parameters in host memory from now on; returns the same object.

    It stays an instance of its class, with its ``param_groups``, hooks and schedulers, and may have been stepped or
    loaded already. It has to update each parameter by that parameter's own gradient and state, as all of torch's do
    but LBFGS.

    Parameters
    ----------
    optimizer
        Any torch optimizer.
    chosen
        Those parameters, with the bytes of their state: the same on every rank, for a step may be a collective.
    runtime
        Makes the moves.

    """
    # What a scheduler that was made before put over the method would go past ours.
    patched = vars(optimizer).pop("step", None)
    own = type(optimizer)
    optimizer.__class__ = type(f"HostState{own.__name__}", (HostStateOptimizer, own), {"__doc__": own.__doc__})
    assert isinstance(optimizer, HostStateOptimizer)
    optimizer._sizes, optimizer._runtime = dict(chosen), runtime
    optimizer._patch_step_function()  # so that torch runs the hooks around our step
    if patched is not None:
        optimizer.step = _counted(optimizer, patched)  # type: ignore[method-assign]
    optimizer._to_host(optimizer._sizes)
    return optimizer


def _counted(optimizer: Optimizer, patched: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step as a scheduler wants to see it: it looks for its own mark, and whether a step came first."""

    @functools.wraps(patched)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(optimizer).step(optimizer, *args, **kwargs)

    return step


class _Parked:
    """Hides a tensor from ``Optimizer.load_state_dict``, which would bring all of the state to the device at once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class HostStateOptimizer(Optimizer):
    """What :func:`keep_in_host_memory` puts in front of an optimizer's own class."""

    _sizes: Mapping[Tensor, int] = MappingProxyType({})  # of a copy, which is an optimizer like any other
    _runtime: Runtime

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step: first what lives on the device, then the rest, bucket by bucket."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = self._buckets()
        resident = [p for group in self.param_groups for p in group["params"] if p not in self._sizes]
        # A step may count in its group, and must find there what a step in one go would have found.
        found = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        parts: list[tuple[list[Tensor], list[Tensor]]] = [(bucket, bucket) for bucket in buckets]
        if resident or not buckets:
            parts.insert(0, (resident, []))
        for stepped, brought in parts:
            for group, values in zip(self.param_groups, found, strict=True):
                for name in group.keys() - values.keys() - {"params"}:
                    del group[name]
                group.update(values)
            with self._only(stepped), self._on_device(brought):
                self._own_step()
        if buckets:
            self._runtime.synchronize()  # whoever reads the state next reads it by the host
        return loss

    def _own_step(self) -> None:
        """Call the step of the optimizer's own class, without the hooks that torch runs around it."""
        own: Any = super().step
        if getattr(own, "hooked", False):
            own.__wrapped__(self)
        else:
            own()

    def _buckets(self) -> list[list[Tensor]]:
        """Return the chosen parameters that have a gradient, in the optimizer's order."""
        buckets: list[list[Tensor]] = []
        free = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._sizes or parameter.grad is None:
                    continue
                size = self._sizes[parameter]
                if size > free or not buckets:
                    buckets.append([])
                    free = BUCKET
                buckets[-1].append(parameter)
                free -= size
        return buckets

    @contextmanager
    def _only(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Let the groups hold these parameters alone; a group without one is out of the way."""
        wanted, groups = set(parameters), self.param_groups
        held = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in wanted]
        self.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            self.param_groups = groups
            for group, params in zip(groups, held, strict=True):
                group["params"] = params

    @contextmanager
    def _on_device(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Bring the state of these parameters to the device, and take it back into the same host memory."""
        in_host = {parameter: dict(self.state[parameter]) for parameter in parameters if parameter in self.state}
        for parameter, state in in_host.items():
            for name, value in state.items():
                if moves(value):
                    self.state[parameter][name] = _moved(value, self._runtime.to_device(_local(value)))
        try:
            yield
        finally:
            self._to_host(parameters, in_host)

    def _to_host(self, parameters: Iterable[Tensor], earlier: Mapping[Tensor, dict[Any, Any]] | None = None) -> None:
        """Take the state of parameters to host memory, into that which an earlier one was in where it is as large."""
        for parameter in parameters:
            if parameter not in self.state:
                continue
            state = self.state[parameter]
            before = (earlier or {}).get(parameter, {})
            for name, value in state.items():
                if not moves(value):
                    continue
                host, local = before.get(name), _local(value)
                out = _local(host) if isinstance(host, Tensor) else None
                if out is not None and (out.shape != local.shape or out.dtype != local.dtype):
                    out = None
                moved = self._runtime.to_host(local, out)
                state[name] = host if moved is out else _moved(value, moved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which goes to host memory without having been on the device."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        hidden = {number for number, parameter in zip(saved, parameters, strict=False) if parameter in self._sizes}
        states = {
            number: {name: _Parked(value) if moves(value) else value for name, value in state.items()}
            if number in hidden
            else state
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter in self._sizes:
            for name, value in self.state.get(parameter, {}).items():
                if isinstance(value, _Parked):
                    dtype = parameter.dtype if parameter.is_floating_point() else value.tensor.dtype  # as torch does
                    value = value.tensor.to(dtype)
                    self.state[parameter][name] = _moved(value, self._runtime.to_host(_local(value)))


def moves(value: Any) -> bool:
    """Return whether a value of the state is moved: a tensor with dimensions; counts stay where they are."""
    return isinstance(value, Tensor) and value.ndim > 0


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _moved(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor with other memory. A DTensor keeps its mesh and placements, as FSDP2's offloaded parameters do."""
    if not isinstance(tensor, DTensor) or local is tensor._local_tensor:
        return tensor if local is _local(tensor) else local
    # DTensor.from_local would take it to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
