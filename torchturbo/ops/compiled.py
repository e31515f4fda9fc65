"""Operators fused by torch.compile for a CPU: one C++ kernel instead of a pass over memory for each elementary step.

Each function is compiled once a process, for any length (``dynamic``): batches differ, and a kernel for every length
would be compiled at every other step. The sources are the formulas that the probes hold the models to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.ops import find, shapes
from torchturbo.ops.replace import Handle

if TYPE_CHECKING:
    from torchturbo.ops.find import Site


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _sum_of_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    return functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """Return RMSNorm of x [..., H], see :func:`torchturbo.ops.find.rms_norm`."""
    # Rows are flattened, so that one kernel serves hidden states [B, T, H] and heads [B, T, N, D] alike.
    result: Tensor = _compiled(find.rms_norm)(x.flatten(0, -2), weight, eps, offset, cast_first)
    return result.view(x.shape)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated q [B, N, T, D] and k [B, K, T, D], see :func:`torchturbo.ops.find.rotary`."""
    result: tuple[Tensor, Tensor] = _compiled(find.rotary)(q, k, cos, sin)
    return result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all [..., I]."""
    result: Tensor = _compiled(_silu_mul)(gate.flatten(0, -2), up.flatten(0, -2))
    return result.view(gate.shape)


def token_sum(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the summed cross-entropy of logits [N, V] and targets [N]."""
    result: Tensor = _compiled(_sum_of_losses)(logits, targets, ignore_index)
    return result


def rms_norm(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Fuse the norms' casts, mean, root and products."""
    return shapes.rms_norm(sites, norm)


def rope(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Fuse the rotation of queries and keys."""
    return shapes.rope(sites, rotary)


def swiglu(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Fuse the activation and the product of the gated MLP."""
    return shapes.swiglu(sites, gated)


def cross_entropy(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Fuse the softmax, the choice of the target and the sum."""
    return shapes.cross_entropy(sites, token_sum)
