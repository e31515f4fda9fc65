"""An output head and its cross-entropy in chunks of rows: the logits of one chunk exist at a time.

Two modes. *Gradient in forward* computes each chunk's gradients at once and only scales them in backward: three matrix
products a chunk, as without chunks. *Recompute* checkpoints each chunk and computes its logits again in backward, four
products; it works with any head, since autograd does the rest. The first is Liger's and VeOmni's scheme (and that of
``torch.nn.functional.linear_cross_entropy``), the second torch.utils.checkpoint on a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchturbo.objectives.deferred import Operation, transformed


def autocast_format(device_type: str) -> torch.dtype | None:
    """Return the number format that autocast has in force for a device; None without autocast."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def kept_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the rows [M] of targets [N] that count, int64; None where all do."""
    kept = target.ne(ignore_index).nonzero().squeeze(1)
    return None if len(kept) == len(target) else kept


def recomputed_sum(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    target: Tensor,
    kept: Tensor | None,
    operations: Sequence[Operation],
    size: int,
) -> Tensor:
    """Return the sum of the cross-entropies of hidden states [N, H] against targets [N], a scalar.

    ``project`` makes logits [n, V] of rows [n, H]. It runs at least once, with a row that counts for nothing where no
    row does, so that every parameter gets a gradient and every rank calls the same collectives.
    """

    def of_chunk(rows: Tensor, labels: Tensor) -> Tensor:
        logits = transformed(project(rows), operations)
        return functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-1)

    if kept is not None and len(kept):
        hidden, target = hidden.index_select(0, kept), target.index_select(0, kept)
    elif kept is not None:
        hidden, target = hidden[:1], torch.full_like(target[:1], -1)
    total: Tensor | None = None
    for rows, labels in zip(torch.split(hidden, size), torch.split(target, size), strict=True):
        part = checkpoint(of_chunk, rows, labels, use_reentrant=False)
        total = part if total is None else total + part
    assert total is not None
    return total


def gradient_in_forward_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    kept: Tensor | None,
    operations: Sequence[Operation],
    size: int,
) -> Tensor:
    """Return the same sum for the head ``hidden @ weight.T + bias`` (weight [V, H], bias [V]).

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
            for rows in _chunks(len(hidden), kept, size):
                states = _rows(hidden, rows).to(dtype)
                logits = functional.linear(states, matrix, offset)
                part, slope = _chunk_loss(logits, _rows(target, rows), operations, any(wanted))
                del logits
                if slope is not None:
                    gradients.add(rows, states, matrix, slope)
                total = part if total is None else total + part
        ctx.gradients = gradients
        if total is None:  # no row counts: the sum is 0, and so are the gradients
            total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: autograd would take these gradients for constants
            raise RuntimeError("the gradients of a chunked loss can't be differentiated: turn loss_chunk.enabled off")
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


def _chunks(count: int, kept: Tensor | None, size: int) -> Sequence[slice | Tensor]:
    """Return the rows of each chunk: slices where all rows count, indices [n] where some do not."""
    if kept is not None:
        return torch.split(kept, size) if len(kept) else ()
    return [slice(start, start + size) for start in range(0, count, size)]


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _chunk_loss(
    logits: Tensor, target: Tensor, operations: Sequence[Operation], slope_wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's summed cross-entropy and its slope by the logits [n, V]: softmax - one-hot, and operations."""
    with torch.set_grad_enabled(slope_wanted and bool(operations)):
        leaf = logits.requires_grad_(slope_wanted) if operations else logits
        seen = transformed(leaf, operations)
    logs = functional.log_softmax(seen.detach(), -1)
    column = target.unsqueeze(1)
    total = -logs.gather(1, column).sum()
    if not slope_wanted:
        return total, None
    slope = logs.exp_()
    slope.scatter_add_(1, column, slope.new_full((), -1.0).expand(column.shape))
    if operations:
        (slope,) = torch.autograd.grad(seen, leaf, slope.to(seen.dtype))
    return total, slope.to(logits.dtype)
