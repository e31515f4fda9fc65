"""Step: losses. The model's token cross-entropy goes through the one normaliser."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.objectives.normalise import Normaliser, own_loss_function

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.engine import Context


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Install the normaliser on a model whose loss is Transformers' causal-LM cross-entropy.

    Any other loss (an own loss function, an encoder-decoder) stays with the framework, whose own scaling then holds.
    """
    base = base_model(model)
    if computes_causal_cross_entropy(base):
        context.normaliser = Normaliser(ranks=context.world_size)
        context.normaliser.install(model, base)


def computes_causal_cross_entropy(base: nn.Module) -> bool:
    """Return whether a model computes its loss by Transformers' own function and takes the arguments of its trainer."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if own_loss_function(base) is not ForCausalLMLoss:
        return False
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    if hasattr(base, "accepts_loss_kwargs"):
        return bool(base.accepts_loss_kwargs)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
