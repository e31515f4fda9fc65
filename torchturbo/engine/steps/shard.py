"""Step: shard. FSDP2 takes the model's parameters, and one that has no weights yet gets them, each rank its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchturbo.engine import shard_check
from torchturbo.engine.backends.fsdp2 import offload
from torchturbo.engine.backends.fsdp2.shard import reduce_unused, shard
from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.errors import Problem
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEYS = (
    "parallel_plan.ep_size",
    "mixed_precision",
    "backend_config.reshard_after_forward",
    "backend_config.cpu_offload.enabled",
    "backend_config.cpu_offload.mode",
)
"""What a sharded model is made for: FSDP2 can't be taken out of it again."""
SHARDED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The settings that each sharded model was sharded with."""
log = get_logger(__name__)


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps parameters from ranks and host memory, and what a model that is sharded already can't leave."""
    return [*shard_check.check(model, config, context), *offload.check(model, config, context)] + [
        Problem(
            config.origin(path).place,
            path,
            f"this {type(model).__name__} was sharded with {value}, and now is to be with {config.get(path)}",
            "make the model anew",
        )
        for path, value in SHARDED.get(model, {}).items()
        if config.get(path) != value
    ]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Shard a model that is not yet, and load its weights where it has none."""
    if context.meshes is not None and not isinstance(model, FSDPModule):
        units = find_units(model)
        shard(units, context.meshes, config, context.runtime, partly_used=context.partly_used)
        SHARDED[model] = {path: config.get(path) for path in KEYS}
        log.debug("%d layers are units of sharding, %s", len(units.layers), context.plan)
    elif isinstance(model, FSDPModule):
        reduce_unused(model, context.partly_used)  # another engine may train other parts of it
    if context.weights is not None and any(parameter.is_meta for parameter in model.parameters()):
        offloaded = config.backend_config.cpu_offload.enabled and config.backend_config.cpu_offload.mode == "all"
        context.weights.load(model, torch.device(context.runtime.device_type), offloaded=offloaded)
