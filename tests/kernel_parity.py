"""Checks of one implementation's kernels: values and every gradient against native code and a float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.ops import find

EPS = 1e-6


def oracle_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """RMSNorm written out, https://arxiv.org/abs/1910.07467 equation 4."""
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * (weight + offset)


def oracle_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation of the pairs (i, i + D/2) by an angle each, https://arxiv.org/abs/2104.09864 equation 13."""

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return turn(q), turn(k)


def oracle_token_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log p(target) over the targets that count, one token at a time."""
    losses = [-logits[at].log_softmax(-1)[target] for at, target in enumerate(targets.tolist()) if target != -100]
    return torch.stack(losses).sum()


def results(function: Callable[..., Any], inputs: Sequence[Tensor], trained: int) -> list[Tensor]:
    """Return a function's outputs and the gradients of its first inputs, for a fixed random gradient of the outputs."""
    leaves = [value.detach().clone().requires_grad_(at < trained) for at, value in enumerate(inputs)]
    # What a kernel gets is no leaf: it may write over it, and that must not reach anyone else.
    outputs = function(*[leaf * 1 if at < trained else leaf for at, leaf in enumerate(leaves)])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(value.shape, generator=generator).to(value) for value in outputs]
    torch.autograd.backward(outputs, gradients)
    return [*(value.detach() for value in outputs), *(leaf.grad for leaf in leaves[:trained])]  # type: ignore[misc]


def compare(
    kernel: Callable[..., Any],
    native: Callable[..., Any],
    oracle: Callable[..., Any],
    inputs: Sequence[Tensor],
    trained: int,
    slack: float,
) -> None:
    """Let a kernel be at most twice as far from the oracle as native code, plus ``slack`` of the largest value."""
    exact = results(oracle, [value.double() if value.is_floating_point() else value for value in inputs], trained)
    found, plain = results(kernel, inputs, trained), results(native, inputs, trained)
    assert len(exact) == len(found)
    for truth, value, reference in zip(exact, found, plain, strict=True):
        assert reference.shape == value.shape and reference.dtype == value.dtype
        error, allowed = ((part.double() - truth).abs().max() for part in (value, reference))
        assert error <= 2 * allowed + slack * truth.abs().max(), (float(error), float(allowed))


def check_norm(module: Any, offset: float, cast_first: bool, dtype: torch.dtype, device: str = "cpu") -> None:
    """Hidden states [B, T, H], width not a power of two."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 24, device=device).to(dtype) * 3, torch.randn(24, device=device).to(dtype)

    compare(
        lambda x, weight: module.norm(x, weight, EPS, offset, cast_first),
        lambda x, weight: find.rms_norm(x, weight, EPS, offset, cast_first),
        lambda x, weight: oracle_norm(x, weight, offset),
        (x, weight),
        2,
        1e-6 if dtype == torch.float32 else 8e-3,
    )


def check_rotary(module: Any, device: str = "cpu") -> None:
    """Grouped queries, as attention lays them out: a transposed view."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 8, device=device).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 5, 4, device=device)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))

    compare(module.rotary, find.rotary, oracle_rotary, (q, k, cos, sin), 2, 1e-6)
    before = q.clone(), k.clone()
    module.rotary(q, k, cos, sin)
    assert all(map(torch.equal, before, (q, k))), "what came before may have kept its output for backward"


def check_gated(module: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Gate and up [B, T, I]."""
    torch.manual_seed(0)
    gate, up = (torch.randn(2, 5, 12, device=device).to(dtype) * 2 for _ in range(2))

    def native(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    compare(module.gated, native, native, (gate, up), 2, 1e-6 if dtype == torch.float32 else 8e-3)


def check_token_sum(module: Any, device: str = "cpu") -> None:
    """Ignored labels among the targets; then none that counts."""
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 40, device=device) * 4, torch.randint(0, 40, (7,), device=device)
    targets[[1, 4]] = -100

    def native(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    compare(
        lambda logits, targets: module.token_sum(logits, targets, -100),
        native,
        oracle_token_sum,
        (logits, targets),
        1,
        1e-6,
    )
    before = logits.clone()
    total = module.token_sum(logits, torch.full_like(targets, -100), -100)
    assert float(total) == 0.0
    assert torch.equal(before, logits), "the model's output was written over"
