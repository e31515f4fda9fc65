"""Step: losses. The model's token cross-entropy and the plugins' terms go through the one normaliser."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from torchturbo.engine.hooks import Hooks, name_of
from torchturbo.engine.model import base_model
from torchturbo.errors import Problem
from torchturbo.objectives.normalise import Normaliser, Term, own_loss_function

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.engine import Context
    from torchturbo.plugins.contract import Plugin


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem for each plugin whose loss term the model's loss has no place for."""
    if computes_causal_cross_entropy(base := base_model(model)):
        return []
    message = f"{type(base).__name__} computes a loss of its own, which takes no further term"
    return [
        Problem("", f"plugin {name_of(plugin)}", message, "use the plugin with a causal language model")
        for plugin in context.hooks.overriding("loss_term")
    ]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Install the normaliser on a model whose loss is Transformers' causal-LM cross-entropy.

    Any other loss (an own loss function, an encoder-decoder) stays with the framework, whose own scaling then holds.
    """
    base = base_model(model)
    if computes_causal_cross_entropy(base):
        context.normaliser = Normaliser(ranks=context.world_size)
        context.normaliser.terms += [term_of(plugin, context.hooks) for plugin in context.hooks.overriding("loss_term")]
        context.normaliser.install(model, base)


def term_of(plugin: Plugin, hooks: Hooks) -> Term:
    """Return a plugin's loss term as the normaliser takes it."""

    def value(outputs: Any, batch: Mapping[str, Any]) -> Any:
        return hooks.call_one(plugin, "loss_term", outputs, batch)

    def weight(batch: Mapping[str, Any]) -> Any:
        return hooks.call_one(plugin, "loss_weight", batch)

    weighted = plugin in hooks.overriding("loss_weight")
    return Term(name_of(plugin), value, weight if weighted else None)


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
