"""Step: sequence parallelism. Several ranks share the sequences of one micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.engine.steps.routers import asked_for
from torchturbo.errors import Problem
from torchturbo.parallel.sequence import SequenceParallel, remove
from torchturbo.parallel.sequence_check import obstacles

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEY = "parallel_plan.sp_size"


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps a model's sequences from being shared by ranks, all at once."""
    size = config.parallel_plan.sp_size
    if size == 1:
        return []
    place = config.origin(KEY).place
    return [Problem(place, KEY, *found) for found in obstacles(model, size, router_loss=not asked_for(config))]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Put sequence parallelism into a model, over the group of ranks that the mesh has for it."""
    if config.parallel_plan.sp_size == 1 or context.meshes is None:
        return
    normaliser = context.normaliser
    parallel = SequenceParallel(context.meshes.sp.get_group(), lambda: normaliser is not None and normaliser.active)
    parallel.install(model, base_model(model))
    context.sequence = parallel


def undo(model: nn.Module) -> None:
    """Let a model compute whole sequences again."""
    remove(model, base_model(model))
