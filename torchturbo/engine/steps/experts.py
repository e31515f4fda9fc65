"""Step: expert parallelism. Each rank keeps its share of the experts, and tokens travel to them."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchturbo.engine.backends.fsdp2.shard import expert_shard_dim
from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.ops.replace import Attribute, Handle
from torchturbo.parallel import experts as fused
from torchturbo.parallel.dispatch import DISPATCHERS, Dispatcher
from torchturbo.parallel.mesh import EP_SIZE, nearest_divisors

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

DIVIDED: WeakKeyDictionary[nn.Module, Handle] = WeakKeyDictionary()
"""The forward of every module whose experts are divided."""
log = get_logger(__name__)


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps the experts of a model from being divided; the weights are not looked at."""
    if context.plan.ep_size == 1 or context.plan.world_size % context.plan.ep_size:  # the mesh's problem
        return []
    place, found = config.origin(EP_SIZE).place, fused.find_experts(model)
    if not found:
        others = fused.lookalikes(model)
        kind = type(model).__name__
        message = f"{kind} has no experts to divide"
        if others:
            message = f"{kind} has experts that are not stacked and called with ({', '.join(fused.ARGUMENTS)}): {', '.join(others)}"
        return [Problem(place, EP_SIZE, message, "set it to 1")]
    units = {id(module) for layer in find_units(model).layers for _, module in layer.experts}
    problems: dict[str, str] = {}  # a problem of every layer is told once
    for name, module in found.items():
        if module in DIVIDED:  # by an earlier engine, to which FSDP2 has bound it
            continue
        reason = fused.refusal(name, module)
        if reason is None and id(module) not in units:
            reason = f"{name} is in no layer that every batch passes and that is sharded by itself"
        if reason is not None:
            problems[reason] = "set it to 1"
        else:
            problems |= _uneven(module, context)
    return [Problem(place, EP_SIZE, message, remedy) for message, remedy in problems.items()]


def _uneven(module: nn.Module, context: Context) -> dict[str, str]:
    """Return what does not divide, with every factor, and the nearest that does."""
    plan, experts = context.plan, fused.number_of_experts(module)
    nearest = [size for size in nearest_divisors(plan.ep_size, experts) if plan.world_size % size == 0]
    if experts % plan.ep_size:
        message = (
            f"{plan.ep_size} ranks share the {experts} experts of {type(module).__name__}:"
            f" {experts} / {plan.ep_size} = {experts / plan.ep_size:g} is no whole number"
        )
        return {message: f"use {' or '.join(map(str, nearest or [1]))}"}
    problems = {}
    for name, parameter in module.named_parameters(recurse=False):
        if expert_shard_dim(tuple(parameter.shape), plan.ep_fsdp_size, plan.ep_size) == 0:
            message = (
                f"ep_fsdp_size = world_size / ep_size = {plan.world_size} / {plan.ep_size} = {plan.ep_fsdp_size} ranks"
                f" shard each expert of {type(module).__name__}, but divide none of the sizes of {name}"
                f" {list(parameter.shape[1:])}"
            )
            problems[message] = _other_sizes(module, context)
    return problems


def _other_sizes(module: nn.Module, context: Context) -> str:
    """Return which sizes do divide, the nearest."""
    world_size, experts = context.plan.world_size, fused.number_of_experts(module)
    shapes = [tuple(value.shape) for value in module.parameters()]
    fits = [
        size
        for size in range(1, world_size + 1)
        if world_size % size == 0
        and experts % size == 0
        and (size == 1 or all(expert_shard_dim(shape, world_size // size, size) for shape in shapes))
    ]
    nearest = sorted(fits, key=lambda size: (abs(size - context.plan.ep_size), size))[:2]
    return f"use {' or '.join(map(str, sorted(nearest)))}"


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Divide the experts over the ranks of each ``ep`` group, and let their tokens be dispatched."""
    ep_size = config.parallel_plan.ep_size
    if ep_size == 1 or context.meshes is None:
        return
    if problems := check(model, config, context):
        fail(problems)
    dispatcher = DISPATCHERS[config.moe.token_dispatcher]
    found = [module for module in fused.find_experts(model).values() if module not in DIVIDED]
    experts = 0
    for module in found:
        experts = fused.number_of_experts(module)
        forward = dispatched(module, experts, context.meshes.ep.get_group(), dispatcher)
        fused.divide(module, context.meshes.ep)
        # Not one of the operators' forwards: a second engine takes those out, and leaves experts divided.
        DIVIDED[module] = Attribute(module, "forward", MethodType(forward, module))
    if found:
        log.info_rank0(
            "expert parallelism: %d layers, %d of %d experts on each rank", len(found), experts // ep_size, experts
        )


def dispatched(module: nn.Module, experts: int, group: Any, dispatcher: Dispatcher) -> Callable[..., Tensor]:
    """Return a forward for a module whose experts are divided; this rank's are computed by the forward it has now."""
    own = vars(module).get("forward")  # an operator's; otherwise the one of its class, which FSDP2 changes later

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def compute(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            with fused.local_experts(self):
                result: Tensor = (own or type(self).forward.__get__(self))(rows, chosen, weights)
            return result

        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = (value.reshape(-1, value.shape[-1]) for value in (top_k_index, top_k_weights))
        result = dispatcher(compute, rows, index, weights, experts, group)
        # A view would lose FSDP2's hook to code that adds to it in place.
        return result if result.shape == hidden_states.shape else result.view_as(hidden_states).clone()

    return forward


def undo(model: nn.Module) -> None:
    """Give every rank all experts again, where FSDP2 has not taken them over: a collective."""
    for module in model.modules():
        if module in DIVIDED and not isinstance(module, FSDPModule):
            DIVIDED.pop(module).remove()
            fused.unite(module)
