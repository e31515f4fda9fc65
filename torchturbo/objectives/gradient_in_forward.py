"""The chunked loss of a linear head with its gradients computed in forward: three matrix products, as without chunks.

Each chunk's gradients are computed beside its loss, and backward only scales them. This is Liger's and VeOmni's scheme,
and that of ``torch.nn.functional.linear_cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.chunk import NO_SECOND_ORDER, autocast_format, chunk_loss, chunks_of, rows_of
from torchturbo.objectives.deferred import Operation


def gradient_in_forward_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    kept: Tensor | None,
    operations: Sequence[Operation],
    size: int,
) -> Tensor:
    """Return the sum of the cross-entropies of hidden states [N, H] against targets [N], a scalar.

    The head is ``hidden @ weight.T + bias`` (weight [V, H], bias [V]).

    Its gradients are computed here where one is wanted, and can be handed out once.
    """
    apply: Callable[..., Tensor] = _GradientInForward.apply
    return apply(hidden, weight, bias, target, kept, operations, size, torch.is_grad_enabled())


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        kept: Tensor | None,
        operations: Sequence[Operation],
        size: int,
        recording: bool,
    ) -> Tensor:
        wanted = [need and recording for need in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden, weight, bias, wanted)
        dtype = autocast_format(hidden.device.type) or weight.dtype
        total: Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):  # formats are handled by hand below
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            for rows in chunks_of(len(hidden), kept, size):
                states = rows_of(hidden, rows).to(dtype)
                logits = functional.linear(states, matrix, offset)
                part, slope = chunk_loss(logits, rows_of(target, rows), operations, any(wanted))
                del logits
                if slope is not None:
                    gradients.add(rows, states, matrix, slope)
                del slope  # the next chunk's logits take its place
                total = part if total is None else total + part
        ctx.gradients = gradients
        if total is None:  # no row counts: the sum is 0, and so are the gradients
            total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        (scale,) = slopes  # of the one output
        if torch.is_grad_enabled():  # create_graph: autograd would take these gradients for constants
            raise RuntimeError(NO_SECOND_ORDER)
        hidden, weight, bias = ctx.gradients.handed_out(scale)
        return hidden, weight, bias, None, None, None, None, None


class _Gradients:
    """The gradients of one loss: of hidden states [N, H], weight [V, H] and bias [V]; None for what needs none."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self.spent = False
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight) if wanted[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None

    def add(self, rows: slice | Tensor, states: Tensor, matrix: Tensor, slope: Tensor) -> None:
        """Add what a chunk gives: its states [n, H], the head's matrix [V, H], the loss's slope by logits [n, V]."""
        if self.hidden is not None:
            self.hidden[rows] = torch.mm(slope, matrix).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slope.dtype:
            self.weight.addmm_(slope.t(), states)
        elif self.weight is not None:
            self.weight += torch.mm(slope.t(), states)
        if self.bias is not None:
            self.bias += slope.sum(0)

    def handed_out(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return them times the slope of what was made of the loss. In place: a weight's has the size of the weight."""
        if self.spent:
            message = "the gradients of a chunked loss were computed in its forward pass and have been handed out"
            raise RuntimeError(f"{message}: run the forward pass again instead of going backward twice")
        self.spent = True
        gradients = self.hidden, self.weight, self.bias
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(scale)
        self.hidden = self.weight = self.bias = None
        return gradients
