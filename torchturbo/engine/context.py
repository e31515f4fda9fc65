"""What the steps know about this process, and what they leave for the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchturbo.engine.hooks import Hooks
from torchturbo.runtime import Runtime, current_runtime

if TYPE_CHECKING:
    from torchturbo.objectives.normalise import Normaliser


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
