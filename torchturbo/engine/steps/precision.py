"""Step: number formats. Trainable parameters are fp32 whatever the checkpoint holds; bf16 is autocast around the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context


KEY = "mixed_precision"


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem where the device does not compute in the format that is asked for."""
    if config.mixed_precision != "bf16" or context.runtime.supports_bf16():
        return []
    message = f"{context.runtime.device_name()} does not compute in bf16"
    return [Problem(config.origin(KEY).place, KEY, message, "use fp32")]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Hold trainable parameters in fp32 and choose the autocast format.

    AdamW's updates vanish in bf16 weights (8 bits of mantissa), so the master copy is the parameter itself. Frozen
    parameters keep their format under autocast, which casts them anyway; without autocast they must match.
    """
    context.autocast_dtype = torch.bfloat16 if config.mixed_precision == "bf16" else None
    for parameter in model.parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or context.autocast_dtype is None):
            parameter.data = parameter.data.float()
