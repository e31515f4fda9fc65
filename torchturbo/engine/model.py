"""Finding the Transformers model inside what a trainer holds."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside a PEFT model, or the model itself."""
    unwrap: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()
