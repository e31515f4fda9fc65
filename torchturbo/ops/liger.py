"""Operators of Liger Kernel (Triton, for CUDA): https://github.com/linkedin/Liger-Kernel, https://arxiv.org/abs/2410.10989.

Its autograd functions are used, not its patches of model classes. They save memory by writing results over their inputs;
what another consumer may still need is copied first. SwiGLU's backward writes over the outputs of the gate's and up's
linear layers, which nothing reads any more, but a second backward through the same graph would.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchturbo.ops import shapes
from torchturbo.ops.replace import Handle

if TYPE_CHECKING:
    from torchturbo.ops.find import Site


def _functions() -> Any:
    return import_module("liger_kernel.ops")


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """Return RMSNorm of x [..., H], see :func:`torchturbo.ops.find.rms_norm`."""
    # not in place: a residual stream may still hold the gradient that the kernel would write over
    mode = "llama" if cast_first else "gemma"
    result: Tensor = _functions().LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    return result


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated q [B, N, T, D] and k [B, K, T, D], see :func:`torchturbo.ops.find.rotary`."""
    # The kernel rotates in place in the layout [B, T, N, D] without telling autograd; it gets copies in that layout.
    q, k = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    result: tuple[Tensor, Tensor] = _functions().LigerRopeFunction.apply(q, k, cos, sin)
    return result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all [..., I]."""
    result: Tensor = _functions().LigerSiLUMulFunction.apply(gate, up)
    return result


def token_sum(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the summed cross-entropy of logits [N, V] and targets [N]."""
    # The kernel leaves the gradient where the logits were: the model's output must not be that memory.
    result: Tensor = _functions().LigerCrossEntropyFunction.apply(
        logits.clone(), targets, None, ignore_index, 0.0, 0.0, "sum"
    )[0]
    return result


def rms_norm(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use Liger's RMSNorm."""
    return shapes.rms_norm(sites, norm)


def rope(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use Liger's rotary embedding."""
    return shapes.rope(sites, rotary)


def swiglu(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use Liger's silu(gate) * up, which keeps no intermediate result for backward."""
    return shapes.swiglu(sites, gated)


def cross_entropy(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use Liger's cross-entropy, which computes the gradient in forward, in one pass over the logits."""
    return shapes.cross_entropy(sites, token_sum)
