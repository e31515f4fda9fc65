"""What the steps know about this process, and what they leave for the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchturbo.engine.hooks import Hooks
from torchturbo.parallel.mesh import Meshes, MeshPlan
from torchturbo.runtime import Runtime, current_runtime

if TYPE_CHECKING:
    from torchturbo.checkpoint.weights import WeightSource
    from torchturbo.objectives.normalise import Normaliser
    from torchturbo.parallel.sequence import SequenceParallel


@dataclass
class Context:
    """What the steps know about this process, and what they leave for the loop."""

    runtime: Runtime = field(default_factory=current_runtime)
    world_size: int = 1
    rank: int = 0
    autocast_dtype: torch.dtype | None = None
    """Number format of the forward pass; None computes in the parameters' own."""
    normaliser: Normaliser | None = None
    """Scales the model's losses; None where the framework's own scaling holds."""
    partly_used: bool = False
    """Whether a batch can leave trained parameters without a gradient, as one without images does a vision tower's."""
    hooks: Hooks = field(default_factory=Hooks)
    """The run's plugins and observers."""
    averaged: bool = False
    """Whether who differentiates the losses takes them as means over the ranks, as Trainer does, and divides by those."""
    plan: MeshPlan = field(default_factory=MeshPlan)
    """The sizes of the mesh's axes, known before there is a process group."""
    sharded: bool = False
    """Whether FSDP2 holds the parameters."""
    meshes: Meshes | None = None
    """The process groups of a sharded run, made by the step "mesh"."""
    weights: WeightSource | None = None
    """Where a model gets its weights from that is still on the meta device when it has been sharded."""
    saved_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Number format of each parameter in the checkpoint that it came from, by name; an export casts back to it."""
    sequence: SequenceParallel | None = None
    """What lets the ranks of a group share a micro-batch's sequences, made by the step "sequence"."""
