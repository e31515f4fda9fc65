"""Step: shard. FSDP2 takes the model's parameters, and one that has no weights yet gets them, each rank its share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchturbo.engine.backends.fsdp2.shard import shard
from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

log = get_logger(__name__)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Shard a model that is not yet, and load its weights where it has none."""
    if context.meshes is not None and not isinstance(model, FSDPModule):
        units = find_units(model)
        shard(units, context.meshes, config, context.runtime, partly_used=context.partly_used)
        log.debug("%d layers are units of sharding, %s", len(units.layers), context.plan)
    if context.weights is not None and any(parameter.is_meta for parameter in model.parameters()):
        offloaded = config.backend_config.cpu_offload.enabled and config.backend_config.cpu_offload.mode == "all"
        context.weights.load(model, torch.device(context.runtime.device_type), offloaded=offloaded)
