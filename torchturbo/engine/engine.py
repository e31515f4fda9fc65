"""The engine: a configuration, the facts of this process, and the pipeline that turns a model into a trainable one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchturbo.engine import pipeline
from torchturbo.runtime import Runtime, current_runtime

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from torchturbo.engine.config import EngineConfig
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


class Engine:
    """Applies one configuration to a model and wraps its forward passes."""

    def __init__(self, config: EngineConfig, context: Context) -> None:
        self.config = config
        self.context = context

    def prepare(self, model: nn.Module) -> nn.Module:
        """Run the pipeline's steps on a model, in place."""
        pipeline.apply(model, self.config, self.context)
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model runs forward, in training and in evaluation alike."""
        dtype = self.context.autocast_dtype
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.context.runtime.device_type, dtype=dtype)


@contextmanager
def restored_determinism() -> Iterator[None]:
    """Put torch's process-wide deterministic mode back at the end of a run inside a longer program."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
