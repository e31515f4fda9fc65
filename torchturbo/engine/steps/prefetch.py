"""Step: prefetch. Units of sharding are told which others to gather ahead of their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchturbo.engine.backends.fsdp2.auto import Choice, choose_strategy
from torchturbo.engine.backends.fsdp2.prefetch import (
    BOTH_WAYS,
    NATIVE,
    Layer,
    apply_lists,
    clear_lists,
    layers_of,
    prefetch_lists,
)
from torchturbo.engine.backends.fsdp2.units import LayerUnit, Units, find_units
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.parallel.mesh import MeshPlan

STRATEGY, AUTO = "backend_config.prefetch_strategy", "auto"
log = get_logger(__name__)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Give the units of a sharded model their lists; ``auto`` says what it chose, and why."""
    section = config.backend_config
    strategy: str = section.prefetch_strategy
    direction = section.prefetch_direction
    depths = section.forward_prefetch_depth, section.backward_prefetch_depth
    units = find_units(model)
    if context.meshes is None or len(units.layers) < 2:
        why = "nothing is sharded" if context.meshes is None else "the model has fewer than two layers"
        idle = strategy in (AUTO, NATIVE)
        (log.debug_rank0 if idle else log.warning_rank0)("no prefetch: %s (%s: %s)", why, STRATEGY, strategy)
        return
    if strategy == AUTO:
        choice = chosen(units, config, context.plan)
        log.info_rank0("prefetch: auto chose %s: %s", *choice)
        strategy = choice.strategy
    elif strategy != NATIVE and not any(layer.experts for layer in units.layers):
        log.info_rank0("prefetch: %s gathers layers ahead; the model has no experts", strategy)
    layers = listed_layers(units, section.prefetch_strategy, context.plan)
    apply_lists(units, prefetch_lists(layers, strategy, direction, *depths))


def listed_layers(units: Units, strategy: str, plan: MeshPlan) -> list[Layer]:
    """Return what lists are made of: under ``auto`` no experts that each rank keeps whole, which nothing is gained by."""
    layers = layers_of(units)
    return [layer._replace(experts=()) for layer in layers] if strategy == AUTO and _are_whole(plan) else layers


def _are_whole(plan: MeshPlan) -> bool:
    """Return whether each rank holds its experts whole: as many ranks divide the experts as there are."""
    return plan.ep_size > 1 and plan.ep_fsdp_size == 1


def chosen(units: Units, config: EngineConfig, plan: MeshPlan) -> Choice:
    """Return what ``auto`` chooses for a model with layers; its weights may be on the meta device."""
    section = config.backend_config
    depth = section.forward_prefetch_depth
    if section.prefetch_direction == BOTH_WAYS:
        depth = max(depth, section.backward_prefetch_depth)
    experts, other = max(gathered_bytes(layer, plan.ep_size) for layer in units.layers)
    if _are_whole(plan):
        experts = 0
    return choose_strategy(depth=depth, ep_size=plan.ep_size, expert_bytes=experts, other_bytes=other)


def gathered_bytes(layer: LayerUnit, ep_size: int) -> tuple[int, int]:
    """Return the bytes that one rank holds of a gathered layer, in the parameters' own format: experts', and the rest.

    Of a sharded parameter ``numel`` counts the whole; expert parallelism leaves a rank its share of the experts.
    """
    experts = {id(p): p for _, module in layer.experts for p in module.parameters()}
    others = [p for p in layer.module.parameters() if id(p) not in experts]
    held = sum(p.numel() * p.element_size() for p in experts.values()) // ep_size
    return held, sum(p.numel() * p.element_size() for p in others)


def undo(model: nn.Module) -> None:
    """Leave the order of gathers to FSDP2 again."""
    clear_lists(model)
