"""Step: shard. FSDP2 takes the model's parameters, and one that has no weights yet gets them, each rank its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchturbo.engine import shard_check
from torchturbo.engine.backends.fsdp2 import offload
from torchturbo.engine.backends.fsdp2.shard import shard
from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.errors import Problem, fail, some
from torchturbo.logging import get_logger
from torchturbo.parallel.mesh import is_offloaded

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEYS = (
    "mtp.enabled",
    "parallel_plan.ep_size",
    "mixed_precision",
    "backend_config.reshard_after_forward",
    "backend_config.cpu_offload.enabled",
    "backend_config.cpu_offload.mode",
)
"""What a sharded model is made for: FSDP2 can't be taken out of it again."""
SHARDED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The settings that each sharded model was sharded with."""
TRAINED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The parameters of each sharded model that were trained then, by name."""
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
        TRAINED[model] = _trained(model)
    elif changed := sorted(_trained(model) ^ TRAINED.get(model, _trained(model))):
        # FSDP2 settles which gradients there are when a parameter is gathered for the first time.
        message = (
            f"{len(changed)} parameters were {_word(model, changed[0])} when the model was sharded: {some(changed)}"
        )
        fail([Problem("", "", message, "train and freeze the same ones again, or make the model anew")])
    if context.weights is not None and any(parameter.is_meta for parameter in model.parameters()):
        device = torch.device(context.runtime.device_type)
        context.weights.load(model, device, offloaded=is_offloaded(config))


def _trained(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def _word(model: nn.Module, name: str) -> str:
    return "frozen" if model.get_parameter(name).requires_grad else "trained"
