"""What a model has that can't be trained sharded, found before its weights are read.

FSDP2 makes every parameter a DTensor, whole only while the module that owns it runs forward, and its gathers are
collectives: all ranks must run the same modules. What reads a parameter at another time, or skips a module on some
ranks only, fails late or waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.checkpoint.weights import WeightSource
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

LAYER_DROP = "layerdrop"
"""End of the names under which models of Transformers have the probability of skipping a layer."""
CHECKPOINTING = "activation_checkpointing.enabled"
LORA = "use LoRA of linear layers (target_modules), or one process"


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps a model from being sharded, and PEFT's prefixes from being recomputed; weights may be on meta."""
    problems = list(_prefixes(model, config))
    if context.sharded:
        problems += _adapters(model)
    if context.world_size > 1:
        problems += _layer_drop(model)
    return problems


def weightless(model: nn.Module, weights: WeightSource | None) -> list[Problem]:
    """Return a problem where a model is on the meta device and nobody said where its weights are."""
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if weights is not None or empty is None:
        return []
    message = f"{type(model).__name__} has no weights: {empty} is on the meta device"
    remedy = "give turbo_weights, where they are to be read from, or a model made by from_pretrained"
    return [Problem("Trainer(model)", "", message, remedy)]


def _peft_configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the settings of each of a model's adapters."""
    for settings in getattr(model, "peft_config", {}).values():
        kind = getattr(settings, "peft_type", "")
        yield str(getattr(kind, "value", kind)), settings


def _prefixes(model: nn.Module, config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem where keys and values that PEFT puts in front would be appended to a second time."""
    if not config.activation_checkpointing.enabled:
        return
    if not getattr(base_model(model), "supports_gradient_checkpointing", False):
        return  # it trains without
    for kind, settings in _peft_configs(model):
        # They go in as a key-value cache, to which the layers' recomputation adds again.
        if getattr(settings, "is_prompt_learning", False) and kind == "PREFIX_TUNING":
            message = "prefix tuning hands its prefix on in the key-value cache, which recomputed layers fill twice"
            yield Problem(config.origin(CHECKPOINTING).place, CHECKPOINTING, message, "set it to false")


def _adapters(model: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each kind of PEFT's that reads a parameter outside of the forward pass of its module."""
    for kind, settings in _peft_configs(model):
        if getattr(settings, "is_prompt_learning", False):
            message = "PEFT reads the weights of a prompt outside of the forward pass, where they are sharded"
            yield Problem("peft_type", "", f"{kind}: {message}", LORA)
    wrapped = next((name for module in model.modules() for name in _fused_target(module)), None)
    if wrapped is not None:
        message = f"PEFT adds to {wrapped} before the experts run forward, where it is sharded"
        yield Problem("target_parameters", "", message, LORA)


def _fused_target(module: nn.Module) -> Iterator[str]:
    """Yield the name of a parameter of fused experts, three-dimensional, that a module of PEFT's adds to."""
    name, unwrap = getattr(module, "parameter_name", None), getattr(module, "get_base_layer", None)
    if isinstance(name, str) and unwrap is not None and getattr(unwrap(), name).dim() > 2:
        yield name


def _layer_drop(model: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each probability with which a rank would skip layers that the others wait in."""
    found: dict[str, float] = {}
    for module in base_model(model).modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in vars(owner).items() if owner is not None else ():
                if name.endswith(LAYER_DROP) and isinstance(value, float | int) and value > 0:
                    found[name] = value
    for name, value in found.items():
        message = f"{value:g}: each rank would skip layers of its own, and wait for the others in the rest"
        yield Problem(name, "", message, f"set {name} to 0 in the model's configuration")
