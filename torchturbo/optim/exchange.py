"""Bringing sharded matrices whole to one rank each, and their updates back: two all-to-alls for as many matrices as ranks.

A matrix has to be whole where it is orthogonalised, but that need not be everywhere. As in Dion's and VeOmni's Muon, of
each round of matrices every rank gets one: it is gathered once, worked on once, and each rank gets its part of the
result. What a rank computes and what it sends then falls with the number of ranks; an all-gather would have all of
them do all of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from torchturbo.optim.fused import Fused

T = TypeVar("T")


class Piece(NamedTuple):
    """Matrices that are worked on together: one, or some of a stack of experts."""

    shard: Tensor
    """What this rank holds of them, ``[m, K]``, ``[e, m, K]`` or, cut along the columns, ``[..., M, k]``."""
    weight: Tensor
    """Where this rank's part of the update goes: a view of the parameter's own shard, of the same shape."""
    layout: Fused | None = None
    dim: int = -2
    """What the matrices are cut along."""
    sizes: tuple[int, ...] = ()
    """Rows or columns that each rank holds."""

    def elements(self) -> list[int]:
        """Return how many numbers each rank holds."""
        across = math.prod(size for at, size in enumerate(self.shard.shape) if at != self.shard.ndim + self.dim)
        return [size * across for size in self.sizes]

    def joined(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the whole matrices, from every rank's numbers."""
        shape = list(self.shard.shape)
        shards = []
        for part, size in zip(parts, self.sizes, strict=True):
            shape[self.dim] = size
            shards.append(part.view(shape))
        return torch.cat(shards, self.dim)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Return every rank's part of whole matrices."""
        return list(torch.split(whole, list(self.sizes), self.dim))


class Round:
    """Matrices on their way: the first piece goes to rank 0 of the group, the next to rank 1, and so on, and back.

    Made on every rank of the group, with the same pieces in the same order, at most as many as there are ranks. The
    exchanges run in the background; :meth:`work` and :meth:`updates` wait for the one before.
    """

    def __init__(self, pieces: list[Piece], group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.pieces, self._group = pieces, group
        self._own = pieces[rank] if rank < len(pieces) else None
        self._own_elements = [0] * ranks if self._own is None else self._own.elements()
        self._elements = [piece.shard.numel() for piece in pieces] + [0] * (ranks - len(pieces))
        self._exchange([piece.shard for piece in pieces], self._elements, self._own_elements)

    def work(self, function: Callable[[Tensor, Fused | None], Tensor]) -> Round:
        """Apply a function to this rank's matrices, whole, with their layout, and begin to send the result back."""
        parts = torch.split(self._received(), self._own_elements)
        back = [] if self._own is None else self._own.cut(function(self._own.joined(parts), self._own.layout))
        self._exchange(back, self._own_elements, self._elements)
        return self

    def updates(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with this rank's part of what was made of it."""
        found = torch.split(self._received(), self._elements)
        for piece, update in zip(self.pieces, found, strict=False):
            yield piece, update.view(piece.shard.shape)

    def _exchange(self, tensors: list[Tensor], sent: list[int], received: list[int]) -> None:
        empty = self.pieces[0].shard.new_empty(0)
        self._sent = torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)])
        self._arriving = empty.new_empty(sum(received))
        self._pending = dist.all_to_all_single(
            self._arriving, self._sent, received, sent, group=self._group, async_op=True
        )

    def _received(self) -> Tensor:
        if self._pending is not None:
            self._pending.wait()
        return self._arriving


def cut_axis(parameter: DTensor) -> int | None:
    """Return the mesh axis along which matrices are cut; None where they are whole, each on its rank.

    Raises
    ------
    ValueError
        If there are several such axes.

    """
    leading = range(parameter.ndim - 2)
    axes = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if parameter.device_mesh.size(axis) > 1 and not placement.is_replicate() and _dim(placement) not in leading
    ]
    if len(axes) > 1:
        raise ValueError(
            f"expected matrices cut along one mesh axis, got {list(parameter.shape)} {parameter.placements}"
        )
    return axes[0] if axes else None


def shard_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return how many rows each rank holds of a dimension, as DTensor cuts it: like ``torch.chunk``, the last ones less."""
    most = -(-length // ranks)
    return tuple(max(0, min(most, length - rank * most)) for rank in range(ranks))


def rounds(pieces: Iterable[Piece], group: dist.ProcessGroup) -> Iterator[Round]:
    """Yield the rounds that bring pieces to the ranks of a group."""
    remaining = iter(pieces)
    while found := list(islice(remaining, dist.get_world_size(group))):
        yield Round(found, group)


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield each item once the one after it has been made: its exchange then runs during the work on this one."""
    waiting: list[T] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting


def _dim(placement: Placement) -> int:
    """Return the dimension that a shard is cut along, a strided one too."""
    return int(getattr(placement, "dim", -1))
