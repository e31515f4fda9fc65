"""A plan: what was worked out, and the same as one JSON document with keys that stay. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torchturbo
from torchturbo.engine.backends.fsdp2.prefetch import Layer, Prefetch
from torchturbo.errors import Problem
from torchturbo.parallel.batch import BatchPlan
from torchturbo.plan.memory import Range
from torchturbo.plan.mesh import Axis, nodes, ranks_text


class Model(NamedTuple):
    """The model of a plan."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    trained: int
    layers: int
    precision: str
    """What it computes in: ``bf16`` or ``fp32``."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: exact for what is held between the steps, and an estimate of what passes through."""

    parameters: int
    gradients: int
    optimizer: Range | None
    """None where the optimizer's state is not known."""
    optimizer_words: str
    buffers: int
    host: Range
    """What of these lies in host memory, beside nothing of it on the device."""
    gathered: int
    reducing: int
    activations: int | None
    """None where they could not be estimated, see :attr:`reason`."""
    mask: int
    """The attention mask of a micro-batch."""
    mask_words: str = ""
    """What needs it."""
    reason: str = ""
    left_out: str = ""
    """What the activations are counted without."""

    @property
    def state(self) -> int:
        """Return what a rank holds between the steps, on device and host together, at most."""
        return self.parameters + self.gradients + (self.optimizer.most if self.optimizer else 0) + self.buffers

    @property
    def passing(self) -> int:
        """Return what a rank holds at the peak of a step beside its state."""
        return self.gathered + self.reducing + (self.activations or 0) + self.mask

    @property
    def total(self) -> int:
        """Return the device memory of a rank at the peak of a step."""
        return self.state - self.host.most + self.passing

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is missing from the total."""
        return self.optimizer is not None and self.activations is not None and not self.left_out


class Order(NamedTuple):
    """What is gathered ahead of what."""

    strategy: str
    """The strategy in force, ``auto`` resolved."""
    reason: str
    """Why ``auto`` chose it; empty where it was set."""
    layers: tuple[Layer, ...]
    lists: dict[str, Prefetch]


@dataclass
class Plan:
    """Everything that was worked out; None for what could not be, or had nothing to be worked out from."""

    world_size: int
    ranks_per_node: int
    axes: list[Axis] | None = None
    batch: BatchPlan | None = None
    length: int | None = None
    """Tokens of the longest sequence."""
    doubled: int | None = None
    """Tokens of the longest sequence of a diffusion model, noisy half and clean half."""
    steps: int | None = None
    model: Model | None = None
    memory: Memory | None = None
    available: int | None = None
    """Bytes of device memory of one rank."""
    order: Order | None = None
    has_experts: bool = False
    """Whether the model is known to be a mixture of experts."""
    names_model: bool = False
    """Whether a model was named, so that its memory was asked for."""
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return nodes(self.world_size, self.ranks_per_node)

    @property
    def fits(self) -> bool | None:
        """Return whether a rank's memory is enough; None where one of the two is not known."""
        if self.memory is None or self.available is None:
            return None
        if self.memory.total > self.available:
            return False
        return True if self.memory.is_complete else None


def as_json(plan: Plan) -> str:
    """Return the plan as JSON; docs/guides/plan.md tells what each key is."""
    tree = {
        "torchturbo": torchturbo.__version__,
        "ok": not plan.errors,
        "world_size": plan.world_size,
        "ranks_per_node": plan.ranks_per_node,
        "nodes": plan.nodes,
        "mesh": None if plan.axes is None else [_axis(axis) for axis in plan.axes],
        "batch": _batch(plan),
        "model": plan.model and plan.model._asdict(),
        "memory": plan.memory and _memory(plan, plan.memory),
        "prefetch": plan.order and _order(plan.order),
        "errors": [problem._asdict() for problem in plan.errors],
        "warnings": [problem._asdict() for problem in plan.warnings],
    }
    return json.dumps(tree, indent=2)


def _axis(axis: Axis) -> dict[str, Any]:
    group = axis.first_group
    return {
        "axis": axis.name,
        "size": axis.size,
        "stride": axis.stride,
        "groups": axis.groups,
        "first_group": {"start": group[0], "stop": group[-1], "step": axis.stride, "text": ranks_text(group)},
        "spans_nodes": axis.spans_nodes,
    }


def _batch(plan: Plan) -> dict[str, Any] | None:
    batch = plan.batch
    if batch is None:
        return None
    return {
        "micro_batch": batch.micro_batch,
        "accumulation": batch.accumulation,
        "dp_size": batch.dp_size,
        "gbs": batch.gbs,
        "sequences_per_step": batch.sequences,
        "sequence_length": plan.length,
        "doubled_length": plan.doubled,
        "tokens_per_step": None if plan.length is None else batch.sequences * plan.length,
        "steps": plan.steps,
    }


def _memory(plan: Plan, memory: Memory) -> dict[str, Any]:
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer and memory.optimizer._asdict(),
        "buffers": memory.buffers,
        "host": memory.host._asdict(),
        "gathered": memory.gathered,
        "reducing": memory.reducing,
        "activations": memory.activations,
        "attention_mask": memory.mask,
        "not_estimated": memory.reason or memory.left_out or None,
        "total": memory.total,
        "available": plan.available,
        "fits": plan.fits,
    }


def _order(order: Order) -> dict[str, Any]:
    return {
        "strategy": order.strategy,
        "reason": order.reason or None,
        "units": [
            {"unit": name, "forward": list(lists.forward), "backward": list(lists.backward)}
            for name, lists in order.lists.items()
        ],
    }
