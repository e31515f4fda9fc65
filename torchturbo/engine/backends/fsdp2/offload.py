"""CPU offload: what of the training state lives in host memory instead of on the device.

``mode: all`` is FSDP2's own policy (:func:`torchturbo.engine.backends.fsdp2.shard.offload_policy`); what it needs of the
process groups is here. ``mode: optimizer`` moves the state of some parameters, a share of all its bytes
(:mod:`torchturbo.engine.backends.fsdp2.host_state`). The choice is pure; the log says what share was reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchturbo.engine.backends.fsdp2.host_state import HostStateOptimizer, keep_in_host_memory
from torchturbo.errors import Problem
from torchturbo.logging import get_logger
from torchturbo.optim.kept import Kept, kept
from torchturbo.parallel.mesh import is_offloaded

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.runtime import Runtime

KEY = "backend_config.cpu_offload.enabled"
log = get_logger(__name__)


# ---- what to move: a pure choice ----


def choose(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Return the parameters whose state is moved, so that their bytes are near a fraction of all.

    The largest come first, each that still fits; then single parameters are added or taken out again for as long as
    that comes nearer. In the end no single one would: the gap is at most half of the smallest parameter that could
    close it. The result depends on names and sizes alone, so it is the same on every rank, in whatever order they come.

    Parameters
    ----------
    sizes
        Bytes of optimizer state by parameter. One without state is never chosen.
    fraction
        Between 0 and 1.

    """
    by_size = sorted((name for name, size in sizes.items() if size), key=lambda name: (-sizes[name], name))
    gap = fraction * sum(sizes.values())  # negative where too much is chosen
    chosen: set[str] = set()
    for name in by_size:
        if sizes[name] <= gap:
            chosen.add(name)
            gap -= sizes[name]
    while movable := [name for name in by_size if (name in chosen) == (gap < 0)]:
        best = min(movable, key=lambda name: abs(abs(gap) - sizes[name]))
        if abs(abs(gap) - sizes[best]) >= abs(gap):
            break
        gap += sizes[best] if best in chosen else -sizes[best]
        chosen ^= {best}
    return frozenset(chosen)


def state_sizes(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of state that each parameter of an optimizer has, or will have, on the rank that holds most.

    Parameters are named by their place, ``0012`` is the thirteenth. Ranks hold unequal shards of one that does not
    divide; all of them count the largest, so that they choose alike.
    """
    found: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = state_count(optimizer, group) if parameter.requires_grad else 0
            found[f"{len(found):04d}"] = count * largest_shard(parameter)
    return found


def state_count(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """Return how many tensors of its parameter's size an optimizer keeps for each parameter of a group.

    Adam's two where its class is not known.
    """
    known = _kept(optimizer, group)
    return 2 if known is None else known.copies


def _kept(optimizer: Optimizer, group: Mapping[str, Any]) -> Kept | None:
    return kept((kind.__name__ for kind in type(optimizer).__mro__), group)


def largest_shard(parameter: Tensor) -> int:
    """Return the bytes of a parameter on the rank that holds most of it."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if placement.is_shard():
                dim = getattr(placement, "dim")  # noqa: B009  # the base class of placements has none
                shape[dim] = -(-shape[dim] // size)
    return torch.Size(shape).numel() * parameter.element_size()


# ---- what is done ----


def offloaded(optimizer: Optimizer, config: EngineConfig, runtime: Runtime) -> Optimizer:
    """Return an optimizer, the same object, with a share of its state in host memory as the configuration asks for.

    Call it once the optimizer is made, on every rank: the choice is the same on all of them, and is logged.
    """
    section = config.backend_config.cpu_offload
    mode, fraction = section.mode, section.optimizer_memory_fraction
    if not section.enabled or isinstance(optimizer, HostStateOptimizer):
        return optimizer
    if runtime.device_type == "cpu":
        log.warning_rank0("%s: the device is the CPU, whose memory is the host's: nothing moves", KEY)
    if mode != "optimizer":
        return optimizer
    sizes = state_sizes(optimizer)
    names = choose(sizes, fraction)
    known = all(_kept(optimizer, group) is not None for group in optimizer.param_groups)
    moved, total = sum(sizes[name] for name in names), sum(sizes.values())
    log.info_rank0(
        "cpu_offload: optimizer state of %d of %d parameters in host memory, %s of %s MiB a rank: %.4f, asked for %g%s",
        len(names), len(sizes), _mib(moved), _mib(total), moved / total if total else 0.0, fraction,
        "" if known else f"; estimated: {type(optimizer).__name__} is counted as Adam",
    )  # fmt: skip
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    chosen = {parameter: sizes[name] for name, parameter in zip(sizes, parameters, strict=True) if name in names}
    return keep_in_host_memory(optimizer, chosen, runtime)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"


def mesh_backend(config: EngineConfig, runtime: Runtime) -> str | None:
    """Return the backends that process groups of a mesh need, or None where the default group's will do.

    With ``mode: all`` gradients are in host memory when they are clipped, and a device's backend reduces nothing there
    (https://github.com/pytorch/pytorch/issues/148532).
    """
    if not is_offloaded(config) or runtime.device_type == "cpu":
        return None
    return f"cpu:gloo,{runtime.device_type}:{runtime.distributed_backend}"


def check(model: Any, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem where this torch has no backend for what ``mode: all`` keeps in host memory."""
    if mesh_backend(config, context.runtime) is None or torch.distributed.is_gloo_available():
        return []
    message = "gradients in host memory are reduced by gloo, which this torch was built without"
    remedy = "install a torch with gloo, or set backend_config.cpu_offload.mode to optimizer"
    return [Problem(config.origin(KEY).place, KEY, message, remedy)]
