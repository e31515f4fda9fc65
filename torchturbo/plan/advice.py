"""What a plan is warned of: memory that does not suffice, and gathers across nodes that a replica in each would save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchturbo.errors import Problem
from torchturbo.observe.size import size
from torchturbo.plan.memory import Weight
from torchturbo.plan.report import Memory, Plan
from torchturbo.plan.traffic import traffic

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

SP, EP = "parallel_plan.sp_size", "parallel_plan.ep_size"


def of(plan: Plan, weights: Sequence[Weight], config: EngineConfig) -> list[Problem]:
    """Return what to warn of about a plan that has its memory."""
    return [*_too_little(plan, config), *_hybrid(plan, weights, config)]


def _too_little(plan: Plan, config: EngineConfig) -> Iterator[Problem]:
    memory = plan.memory
    if memory is None or plan.available is None or memory.total <= plan.available:
        return
    message = f"a rank needs about {size(memory.total)} at the peak of a step and has {size(plan.available)}"
    yield Problem("", "memory", message, " or ".join(_remedies(plan, memory, config)))


def _remedies(plan: Plan, memory: Memory, config: EngineConfig) -> Iterable[str]:
    """Yield what helps most: less state where the state is most of it, less activations where those are."""
    on_device = memory.state - memory.host.most
    if on_device >= memory.passing:
        yield f"more ranks than {plan.world_size}"
        if not config.backend_config.cpu_offload.enabled:
            yield "backend_config.cpu_offload"
        return
    if not config.activation_checkpointing.enabled:
        yield "activation_checkpointing"
    if plan.batch is not None and plan.batch.micro_batch > 1:
        yield "a smaller --per_device_train_batch_size (with a larger gbs)"
    if not config.loss_chunk.enabled:
        yield "loss_chunk.enabled"
    yield f"a larger {SP}"


def _hybrid(plan: Plan, weights: Sequence[Weight], config: EngineConfig) -> Iterator[Problem]:
    """Warn where parameters are gathered across nodes for every micro-batch while one node could hold them all."""
    memory, batch = plan.memory, plan.batch
    if memory is None or batch is None or plan.available is None or plan.nodes < 2 or not memory.is_complete:
        return
    ranks = plan.ranks_per_node
    replica = memory.total + round((memory.state - memory.host.most) * (plan.world_size / ranks - 1))
    if replica > plan.available:
        return
    moved = traffic(
        weights,
        plan.nodes,
        batch.accumulation,
        itemsize=2 if config.mixed_precision == "bf16" else None,
        gathers=2 if config.backend_config.reshard_after_forward else 1,
    )
    if moved.hybrid >= moved.now:
        return
    message = (
        f"hybrid sharding would pay: each node receives about {size(moved.now)} a step, and with a replica in each "
        f"node {size(moved.hybrid)} (ring collectives; a rank would hold {size(replica)} of {size(plan.available)}). "
        f"This version shards over all {plan.world_size:,} ranks"
    )
    remedy = "a larger micro-batch with fewer accumulation steps moves less" if batch.accumulation > 1 else ""
    yield Problem("", "mesh", message, remedy)
