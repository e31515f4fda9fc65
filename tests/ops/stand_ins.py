"""Stand-ins for packages that need a device: the documented functions in plain torch, checking how they are called.

They hold the calls to what the vendors document, not the kernels to their results: no NPU and no GPU is needed, and
nothing here shows that one computes right.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

FORMATS = (torch.float16, torch.bfloat16, torch.float32)


class Device:
    """A runtime of some device type, as far as the registry asks one."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type


def put(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> ModuleType:
    """Let a module be importable for a test."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """https://www.hiascend.com/document/detail/zh/Pytorch/700/apiref/apilist/ptaoplist_000860.html."""
    assert self.dtype in FORMATS and gamma.dtype == self.dtype, "gamma must have the input's format"
    rstd = torch.rsqrt(self.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """https://www.hiascend.com/document/detail/zh/Pytorch/700/apiref/apilist/ptaoplist_000141.html."""
    assert input.dim() == r1.dim() == r2.dim() == 4 and rotary_mode == "half"
    batch, heads, length, width = input.shape
    assert r1.shape in [(1, 1, length, width), (batch, 1, length, width), (batch, heads, length, width)]
    first, second = torch.chunk(input, 2, -1)
    return r1 * input + r2 * torch.cat((-second, first), -1)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """Halves of one tensor: silu of the first times the second."""
    gate, up = self.chunk(2, dim)
    return functional.silu(gate) * up


def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """https://www.hiascend.com/document/detail/zh/Pytorch/700/apiref/apilist/ptaoplist_000146.html."""
    assert input.dim() == 2 and target.dtype == torch.int64 and target.shape == input.shape[:1]
    assert int(target.min()) >= 0, "targets are classes; a negative ignore_index ignores nothing"
    log_prob = input.log_softmax(-1)
    loss = -log_prob.gather(1, target[:, None])[:, 0]
    loss = loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()
    return loss, log_prob, torch.empty(0), torch.empty(0)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: Any = None,
    group_list: Any = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    **_: Any,
) -> list[Tensor]:
    """https://www.hiascend.com/document/detail/zh/Pytorch/700/apiref/apilist/ptaoplist_000524.html."""
    (left,), (right,) = x, weight
    assert not torch.is_grad_enabled() or not (left.requires_grad or right.requires_grad), "it has no backward"
    assert group_list_type == 1 and group_list.dtype == torch.int64 and bias is None
    if group_type == 0:
        assert split_item == 2 and left.dim() == 2 and right.dim() == 3 and int(group_list.sum()) == len(left)
        parts = left.split(group_list.tolist())
        return [torch.cat([part @ right[at] for at, part in enumerate(parts)])]
    assert group_type == 2 and split_item == 3 and left.dim() == right.dim() == 2
    pairs = zip(left.split(group_list.tolist(), 1), right.split(group_list.tolist()), strict=True)
    return [torch.stack([a @ b for a, b in pairs])]


def torch_npu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the stand-in of torch_npu."""
    functions = (npu_rms_norm, npu_rotary_mul, npu_swiglu, npu_cross_entropy_loss, npu_grouped_matmul)
    return put(
        monkeypatch, "torch_npu", npu_fusion_attention=None, **{function.__name__: function for function in functions}
    )


class LigerRMSNormFunction(torch.autograd.Function):
    """liger_kernel.ops.rms_norm 0.8.5; with ``in_place`` it may write over the gradient it gets."""

    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> Tensor:
        assert casting_mode in ("llama", "gemma") and not in_place
        ctx.save_for_backward(X, W)
        ctx.rest = eps, offset
        x = X.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (W.float() + offset)).to(X.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        eps, offset = ctx.rest
        kept = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = (value.detach().float().requires_grad_() for value in kept)
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)
        dx, dw = torch.autograd.grad(y, (x, weight), gradients[0].float())
        return dx.to(kept[0].dtype), dw.to(kept[1].dtype), None, None, None, None, None


class LigerRopeFunction(torch.autograd.Function):
    """liger_kernel.ops.rope 0.8.5: in the layout [B, T, N, D] it rotates in place and tells nobody."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        assert cos.dim() == 3 and position_ids is None and unsqueeze_dim == 1
        ctx.save_for_backward(cos, sin)
        return LigerRopeFunction.turned(q, cos, sin), LigerRopeFunction.turned(k, cos, sin)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        physical = x.transpose(1, 2).contiguous()
        first, second = physical.clone().chunk(2, -1)
        rotated = physical * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]
        return physical.data.copy_(rotated).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return (*(LigerRopeFunction.turned(gradient, cos, -sin) for gradient in gradients), None, None, None, None)


class LigerSiLUMulFunction(torch.autograd.Function):
    """liger_kernel.ops.swiglu 0.8.5: backward leaves its results where gate and up were."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        ctx.save_for_backward(a, b)
        return functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        sigmoid = a.sigmoid()
        to_a, to_b = gradients[0] * b * sigmoid * (1 + a * (1 - sigmoid)), gradients[0] * a * sigmoid
        return a.data.copy_(to_a), b.data.copy_(to_b), None, None


class LigerCrossEntropyFunction(torch.autograd.Function):
    """liger_kernel.ops.cross_entropy 0.8.5: forward leaves the gradient where the logits were."""

    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        *rest: Any,
    ) -> tuple[Any, ...]:
        assert _input.dim() == 2 and weight is None and lse_square_scale == label_smoothing == 0.0 and not rest
        assert reduction == "sum"
        counted = target.ne(ignore_index)
        loss = functional.cross_entropy(_input.float(), target, ignore_index=ignore_index, reduction="sum")
        hot = functional.one_hot(target.clamp(min=0), _input.shape[-1])
        _input.data.copy_((_input.float().softmax(-1) - hot) * counted[:, None])
        ctx.save_for_backward(_input.detach())
        return loss, None, None, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (kept,) = ctx.saved_tensors
        return (kept * gradients[0], *[None] * 6)


def liger_kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the stand-in of Liger Kernel."""
    put(monkeypatch, "liger_kernel").__path__ = []
    functions = (LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction, LigerCrossEntropyFunction)
    return put(monkeypatch, "liger_kernel.ops", **{function.__name__: function for function in functions})
