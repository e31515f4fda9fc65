"""Step: number formats. Trainable parameters are fp32 whatever the checkpoint holds; bf16 is what is computed in."""

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
    """Hold trainable parameters in fp32, remember the formats they came in, and choose how bf16 is computed.

    AdamW's updates vanish in bf16 weights (8 bits of mantissa), so the master copy is the parameter itself. One
    process autocasts; a sharded model gathers its parameters in bf16 (half the bytes on the wire) and computes in
    them, see :func:`torchturbo.engine.backends.fsdp2.shard.mixed_precision`. Frozen parameters keep their format in
    bf16, which casts them anyway; in fp32 they must match.
    """
    bf16 = config.mixed_precision == "bf16"
    context.autocast_dtype = torch.bfloat16 if bf16 and not context.sharded else None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    formats = {name: parameter.dtype for name, parameter in parameters.items()}
    context.saved_dtypes = formats if context.weights is None else formats | context.weights.dtypes(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or not bf16):
            parameter.data = parameter.data.float()
