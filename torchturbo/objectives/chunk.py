"""A chunk of rows: which rows it has, and the cross-entropy of its logits with its slope, softmax - one-hot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.deferred import Operation, transformed

NO_SECOND_ORDER = "the gradients of a chunked loss can't be differentiated: turn loss_chunk.enabled off"


def autocast_format(device_type: str) -> torch.dtype | None:
    """Return the number format that autocast has in force for a device; None without autocast."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def kept_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the rows [M] of targets [N] that count, int64; None where all do.

    Their number is not known before it is read from the device: one wait a forward. It is paid for the rows that then
    never reach the head, the prompts of instruction data and all padding; the alternative would compute them all.
    """
    kept = target.ne(ignore_index).nonzero().squeeze(1)
    return None if len(kept) == len(target) else kept


def chunks_of(count: int, kept: Tensor | None, size: int) -> Sequence[slice | Tensor]:
    """Return the rows of each chunk: slices where all rows count, indices [n] where some do not."""
    if kept is not None:
        return torch.split(kept, size) if len(kept) else ()
    return [slice(start, start + size) for start in range(0, count, size)]


def rows_of(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Return the rows of a chunk."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def chunk_loss(
    logits: Tensor, target: Tensor, operations: Sequence[Operation], slope_wanted: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's summed cross-entropy after operations on logits [n, V], and its slope by the logits."""
    seen = followed(logits, operations, slope_wanted)
    total, slope = loss_and_slope(seen, target, slope_wanted)
    if slope is not None and operations:
        (slope,) = torch.autograd.grad(seen, logits, slope)
    return total, None if slope is None else slope.to(logits.dtype)


def followed(logits: Tensor, operations: Sequence[Operation], differentiable: bool) -> Tensor:
    """Return logits [n, V] after operations; ``torch.autograd.grad`` can go back to the logits given, if wanted."""
    with torch.set_grad_enabled(differentiable and bool(operations)):
        if operations:
            logits.requires_grad_(differentiable)
        return transformed(logits, operations)


def loss_and_slope(logits: Tensor, target: Tensor, slope_wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of logits [n, V], and its slope by them, softmax - one-hot."""
    logs = functional.log_softmax(logits.detach(), -1)
    column = target.unsqueeze(1)
    total = -logs.gather(1, column).sum()
    if not slope_wanted:
        return total, None
    slope = logs.exp_()
    return total, slope.scatter_add_(1, column, slope.new_full((), -1.0).expand(column.shape))
