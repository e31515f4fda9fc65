"""Operators of torch_npu (Huawei Ascend), called as its API reference documents them: https://www.hiascend.com/document.

No NPU has run this: the tests hold it against stand-ins of the documented functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchturbo.ops import shapes, switches
from torchturbo.ops.replace import Handle, with_globals

if TYPE_CHECKING:
    from torchturbo.ops.find import Site


def _functions() -> Any:
    return import_module("torch_npu")


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """Return RMSNorm of x [..., H], see :func:`torchturbo.ops.find.rms_norm`."""
    # npu_rms_norm wants both in one format; Gemma's norms apply the weight in float32 and round afterwards.
    dtype = x.dtype if cast_first else torch.float32
    gamma = (weight + offset if offset else weight).to(dtype)
    result: Tensor = _functions().npu_rms_norm(x.to(dtype), gamma, epsilon=eps)[0]
    return result.to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated q [B, N, T, D] and k [B, K, T, D], see :func:`torchturbo.ops.find.rotary`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B or 1, 1, T, D], its layout beside [B, N, T, D]
    rotate = _functions().npu_rotary_mul
    return rotate(q, cos, sin), rotate(k, cos, sin)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all [..., I]."""
    result: Tensor = _functions().npu_swiglu(torch.cat((gate, up), -1), dim=-1)
    return result


def token_sum(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the summed cross-entropy of logits [N, V] and targets [N]."""
    # npu_cross_entropy_loss takes a negative ignore_index for none at all, and targets must be classes.
    counted = targets.ne(ignore_index)
    losses: Tensor = _functions().npu_cross_entropy_loss(logits, targets.masked_fill(~counted, 0), reduction="none")[0]
    return (losses * counted).sum()


class GroupedMatmul(torch.autograd.Function):
    """``x [S, K]`` in consecutive groups of rows times ``weight [E, K, N]``: npu_grouped_matmul has no backward of its own.

    ``counts`` [E] int64 are the rows of each group. Modes of the operator: ``group_type`` 0 splits the rows of x, 2 the
    dimension that is summed over; ``split_item`` 2 and 3 give one result; ``group_list_type`` 1 means counts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Return the products [S, N]."""
        ctx.save_for_backward(x, weight, counts)
        return _grouped(x, weight, counts, split_item=2, group_type=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x [S, K] and weight [E, K, N]."""
        x, weight, counts = ctx.saved_tensors
        (gradient,) = gradients
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _grouped(gradient, weight.transpose(1, 2), counts, split_item=2, group_type=0)
        if ctx.needs_input_grad[1]:
            to_weight = _grouped(x.T, gradient, counts, split_item=3, group_type=2)
        return to_x, to_weight, None


def _grouped(x: Tensor, weight: Tensor, counts: Tensor, *, split_item: int, group_type: int) -> Tensor:
    result: Tensor = _functions().npu_grouped_matmul(
        [x],
        [weight],
        bias=None,
        group_list=counts,
        split_item=split_item,
        group_type=group_type,
        group_list_type=1,
    )[0]
    return result


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Do what ``torch.nn.functional.grouped_mm`` does: ``offs`` [E] are the ends of the groups."""
    counts = torch.diff(offs.long(), prepend=offs.new_zeros(1, dtype=torch.int64))
    result: Tensor = GroupedMatmul.apply(x.to(weight.dtype), weight, counts)  # type: ignore[no-untyped-call]
    return result


@cache
def _experts() -> FunctionType:
    """Return Transformers' forward of experts in groups, with this product in it."""
    from transformers.integrations import moe

    linear = with_globals(moe._grouped_linear, {"_grouped_mm": _grouped_mm})
    return with_globals(moe.grouped_mm_experts_forward, {"_grouped_linear": linear})


def _experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = _experts()(switches.in_autocast_format(self), *args, **kwargs)
    return result


def rms_norm(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use ``npu_rms_norm(x, gamma, epsilon) -> (y, rstd)``."""
    return shapes.rms_norm(sites, norm)


def rope(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use ``npu_rotary_mul(x, cos, sin)``, whose default mode rotates halves."""
    return shapes.rope(sites, rotary)


def swiglu(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use ``npu_swiglu(x, dim)``, which halves x into gate and up."""
    return shapes.swiglu(sites, gated)


def grouped_mm(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use ``npu_grouped_matmul`` in Transformers' forward of experts."""
    return switches.experts(sites, _experts_forward)


def cross_entropy(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Use ``npu_cross_entropy_loss(input, target, reduction) -> (loss, ...)``."""
    return shapes.cross_entropy(sites, token_sum)
