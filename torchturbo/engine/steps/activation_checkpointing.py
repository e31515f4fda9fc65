"""Step: activation checkpointing. The layers' activations are recomputed in backward instead of kept.

Layers that hold experts route the second time as they did the first (:mod:`torchturbo.parallel.replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.engine.steps.routers import asked_for
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.parallel.experts import number_of_experts
from torchturbo.parallel.replay import replayed

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEY, REENTRANT = "activation_checkpointing.enabled", "activation_checkpointing.use_reentrant"
FUNCTION = "_gradient_checkpointing_func"
"""Where a module of Transformers has what it checkpoints with."""
log = get_logger(__name__)


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem where somebody asked for checkpointing that the model does not have, or that loses gradients."""
    section, base = config.activation_checkpointing, base_model(model)
    if not section.enabled:
        return []
    if not getattr(base, "supports_gradient_checkpointing", False):
        message = f"{type(base).__name__} does not support activation checkpointing"
        return [Problem(config.origin(KEY).place, KEY, message, "set it to false")] if config.origin(KEY).layer else []
    own_loss = getattr(getattr(base, "config", None), "output_router_logits", False) and not asked_for(config)
    if section.use_reentrant and own_loss:
        # They are collected while the layers run forward, which the reentrant kind does without a graph.
        message = "the model's router loss would get no gradient (output_router_logits)"
        return [Problem(config.origin(REENTRANT).place, REENTRANT, message, "set it to false")]
    return []


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Turn checkpointing on or off in the model itself; the framework's own switch is off by then.

    A model that has none is an error where someone asked for it, and one warning where only the default did.
    """
    section = config.activation_checkpointing
    base = base_model(model)
    if not section.enabled:
        undo(model)
        return
    if not getattr(base, "supports_gradient_checkpointing", False):
        if problems := check(model, config, context):
            fail(problems)
        name = type(base).__name__
        log.warning_rank0("%s does not support activation checkpointing: training without it (%s)", name, KEY)
        return
    _switch(base, "enable", {"use_reentrant": section.use_reentrant})
    _let_routing_be_kept(base)
    _let_inputs_require_grad(base, reentrant=section.use_reentrant)


def undo(model: nn.Module) -> None:
    """Turn checkpointing off in a model."""
    _switch(base_model(model), "disable")


def _let_routing_be_kept(base: nn.Module) -> None:
    """Keep which experts the tokens of each layer chose, until the layer has been recomputed."""
    for module in _checkpointed(base):
        if experts := number_of_experts(module):
            own = vars(module)
            own[FUNCTION] = partial(replayed, own[FUNCTION], experts)


def _checkpointed(base: nn.Module) -> list[nn.Module]:
    """Return the modules that checkpoint their forward, or parts of it, with a function of their own."""
    return [
        module
        for module in base.modules()
        if getattr(module, "gradient_checkpointing", False) and FUNCTION in vars(module)
    ]


def _let_inputs_require_grad(base: nn.Module, *, reentrant: bool) -> None:
    """Do for the layers that need it what Transformers does for the output of every embedding.

    Reentrant checkpointing alone needs it: a layer whose inputs require no grad would get no gradient, whatever it
    holds. Transformers' hooks miss towers whose embeddings they can't find, and elsewhere they cost a backward pass
    through a frozen tower, which trains nothing.
    """
    remove = getattr(base, "disable_input_require_grads", None)
    if remove is not None and getattr(base, "_require_grads_hook", None) is not None:
        remove()
    for module in _checkpointed(base) if reentrant else ():
        vars(module)[FUNCTION] = partial(_checkpoint, module, vars(module)[FUNCTION])


def _checkpoint(layer: nn.Module, checkpoint: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint one call of a layer whose inputs may not require grad.

    A layer that is trained gets inputs that do. A frozen one is called as it is: there is nothing to recompute,
    except where keywords bring in what requires grad (cross-attention), which checkpointing would not see.
    """
    if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, **kwargs)
    if not _trains(layer):
        return function(*args, **kwargs)
    return checkpoint(function, *(_recorded(arg) for arg in args), **kwargs)


def _recorded(arg: Any) -> Any:
    recordable = isinstance(arg, torch.Tensor) and arg.is_floating_point()
    return arg.detach().requires_grad_() if recordable else arg


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


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
