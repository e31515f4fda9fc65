"""Collectives of sequence parallelism: the all-to-all that turns split sequences into split heads and back.

DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): outside of attention a rank holds all heads of a part of each
sequence, inside of it the whole sequences of a part of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter: int, gather: int) -> tuple[Tensor, ...]:
    """Split each tensor along one axis over the ranks of a group, and join what comes back along another.

    Tensors of one number format travel in one collective: queries, keys and values of an attention need one, not
    three. The gradients take the way back.

    Parameters
    ----------
    tensors
        Each [..., n * a, ..., b, ...] with n ranks: axis ``scatter`` divides by n. Sizes may differ.
    group
        The ranks that take part; a collective.
    scatter, gather
        The axes that are split and joined.

    Returns
    -------
    tuple of Tensor
        Each [..., a, ..., n * b, ...]; the parts stand in rank order.

    """
    done: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        at = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        results = _Exchange.apply(group, scatter, gather, *(tensors[index] for index in at))  # type: ignore[no-untyped-call]
        done |= zip(at, results, strict=True)
    return tuple(done[index] for index in range(len(tensors)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, scatter: int, gather: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = group, scatter, gather
        return _exchanged(tensors, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, scatter, gather = ctx.way
        return None, None, None, *_exchanged(gradients, group, gather, scatter)


def _exchanged(tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter: int, gather: int) -> tuple[Tensor, ...]:
    size = dist.get_world_size(group)
    parts = [_unflattened(tensor, scatter, (size, -1)).movedim(scatter, 0) for tensor in tensors]  # part j to rank j
    lengths = [part[0].numel() for part in parts]
    sent = tensors[0].new_empty(size, sum(lengths))
    for place, part in zip(torch.split(sent, lengths, 1), parts, strict=True):
        _unflattened(place, 1, part.shape[1:]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    pieces = zip(torch.split(received, lengths, 1), parts, strict=True)
    return tuple(
        _unflattened(piece, 1, part.shape[1:]).movedim(0, gather).flatten(gather, gather + 1) for piece, part in pieces
    )


def _unflattened(tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    result: Tensor = torch.unflatten(tensor, axis, tuple(sizes))
    return result


def gathered(part: Tensor, group: dist.ProcessGroup, axis: int) -> Tensor:
    """Join the parts that the ranks of a group hold along an axis, in rank order; no gradients. A collective."""
    part = part.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, axis)
