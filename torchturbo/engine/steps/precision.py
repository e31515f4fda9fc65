"""Step: number formats. Trainable parameters are fp32 whatever the checkpoint holds; bf16 is what is computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context


KEY = "mixed_precision"
FORMATS: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()
"""The formats in which the parameters of each model came."""


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
    context.saved_dtypes = _formats(model)
    if context.weights is not None:
        context.saved_dtypes |= context.weights.dtypes(model)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            continue  # an earlier engine's doing, which stays as it is: see the step "shard"
        if parameter.is_floating_point() and (parameter.requires_grad or not bf16):
            parameter.data = parameter.data.float()


def _formats(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the number format in which each parameter came to its first engine, by name."""
    known = FORMATS.setdefault(model, {})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype != torch.float32 or name not in known:  # fp32 may be an earlier engine's doing
            known[name] = parameter.dtype
    return dict(known)
