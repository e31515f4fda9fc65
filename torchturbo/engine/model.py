"""The Transformers model inside what a trainer holds, and its key-value cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def set_cache(model: nn.Module, on: bool | None) -> bool | None:
    """Let a model fill its key-value cache or not, and return how it was; None leaves it, or says that it has none."""
    config = getattr(base_model(model), "config", None)
    before: bool | None = getattr(config, "use_cache", None)
    if config is not None and before is not None and on is not None:
        config.use_cache = on
    return before


def base_model(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside a PEFT model, or the model itself."""
    unwrap: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def input_embeddings(module: nn.Module) -> nn.Module | None:
    """Return what a Transformers model, or a tower inside one, computes first; None where it can't tell."""
    get: Callable[[], object] | None = getattr(module, "get_input_embeddings", None)
    try:
        found = get() if get else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None
