"""Step: activation checkpointing. The layers' activations are recomputed in backward instead of kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torchturbo.engine.model import base_model
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
    # Transformers lets the embeddings' output require grad with it, which reentrant checkpointing needs to run at all.
    _switch(base, "enable", {"use_reentrant": section.use_reentrant})


def disable(model: nn.Module) -> None:
    """Turn checkpointing off in a model."""
    _switch(base_model(model), "disable")


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
