"""Steps: plugins see the model on its way through the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context


def model_built(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Step: plugins see the model as it was loaded."""
    _tell("model_built", model, context)


def before_shard(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Step: plugins see the model while its parameters are whole."""
    _tell("before_shard", model, context)


def _tell(hook: str, model: nn.Module, context: Context) -> None:
    if context.hooks.run is not None:
        context.hooks.run.model = model
        context.hooks.call(hook, model)
