"""Step: activation checkpointing. The layers' activations are recomputed in backward instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchturbo.engine.model import base_model, input_embeddings
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.engine import Context

KEY = "activation_checkpointing.enabled"
log = get_logger(__name__)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Turn checkpointing on or off in the model itself; the framework's own switch is off by then.

    A model that has none is an error where someone asked for it, and one warning where only the default did.
    """
    section = config.activation_checkpointing
    base = base_model(model)
    if not section.enabled:
        disable(model)
        return
    if not getattr(base, "supports_gradient_checkpointing", False):
        _refuse_or_warn(base, config)
        return
    _switch(base, "enable", {"use_reentrant": section.use_reentrant})
    _let_inputs_require_grad(base, reentrant=section.use_reentrant)


def disable(model: nn.Module) -> None:
    """Turn checkpointing off in a model."""
    base = base_model(model)
    _switch(base, "disable")
    _remove_hooks(base)


def _let_inputs_require_grad(base: nn.Module, *, reentrant: bool) -> None:
    """Put hooks of our own in place of Transformers', which let the output of every embedding require grad.

    Only reentrant checkpointing needs them: a layer whose inputs require no grad would get no gradient, whatever it
    holds. Everywhere else they would cost a backward pass through a frozen vision tower, which trains nothing.
    """
    _remove_hooks(base)
    hooks = []
    for module in base.modules() if reentrant else ():
        embeddings = input_embeddings(module)
        if embeddings is not None and any(map(_trains, _checkpointed_layers(module))):
            hooks.append(embeddings.register_forward_hook(_require_grad))
    if hooks:  # under Transformers' names, so that its own switch finds them
        vars(base).update(_require_grads_hooks=hooks, _require_grads_hook=hooks[0])


def _remove_hooks(base: nn.Module) -> None:
    for hook in vars(base).pop("_require_grads_hooks", None) or [vars(base).get("_require_grads_hook")]:
        if hook is not None:
            hook.remove()
    vars(base).pop("_require_grads_hook", None)


def _checkpointed_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers inside a module that are recomputed; a tower carries the same mark as its layers."""
    for inner in module.modules():
        if getattr(inner, "gradient_checkpointing", False) and not hasattr(inner, "get_input_embeddings"):
            yield inner


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _require_grad(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _switch(base: nn.Module, verb: str, kwargs: dict[str, bool] | None = None) -> None:
    """Call Transformers' method under its newer name where it has one (the older one warns there)."""
    for prefix in ("activation", "gradient"):
        method = getattr(base, f"{prefix}_checkpointing_{verb}", None)
        if method is None:
            continue
        if kwargs is not None:
            method(kwargs)
        elif getattr(base, "supports_gradient_checkpointing", False):
            method()
        return


def _refuse_or_warn(base: nn.Module, config: EngineConfig) -> None:
    origin = config.origin(KEY)
    name = type(base).__name__
    if origin.layer > 0:
        fail([Problem(origin.place, KEY, f"{name} does not support activation checkpointing", "set it to false")])
    log.warning_rank0("%s does not support activation checkpointing: training without it (%s)", name, KEY)
