"""Bytes that each rank holds of a sharded model, by FSDP2's own rules, as arithmetic: no torch, no loop over ranks.

FSDP2 (``torch.distributed.fsdp.fully_shard``) splits a dimension of ``d`` over ``n`` ranks into pieces of
``ceil(d / n)``: the first ranks have whole pieces, one may have less, the last ones nothing. Parameters and reduced
gradients lie in buffers of a whole piece on every rank, padded where the piece is smaller; an optimizer's state is
made like the piece itself. So rank 0 always holds the most and the last rank the least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchturbo.optim.kept import KEPT

SCALAR = 4
"""Bytes of an optimizer's step count, an fp32 scalar for each parameter."""


@dataclass(frozen=True)
class Weight:
    """One parameter, and how it is split."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element, as the parameter is held between the steps."""
    trained: bool
    unit: str
    """Name of the unit that it is gathered with; empty for the root."""
    dim: int = 0
    """The dimension that FSDP2 splits."""
    shards: int = 1
    """Ranks over which it does."""
    experts: int = 1
    """Expert-parallel ranks over which dimension 0 is split before, evenly."""

    @property
    def numel(self) -> int:
        """Return the elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def gathered(self) -> int:
        """Return the elements that a rank has while the parameter is gathered, the padding included."""
        return self.padded * self.shards

    @property
    def padded(self) -> int:
        """Return the elements of a rank's buffer."""
        return self._elements(self._piece)

    def held(self, rank: int) -> int:
        """Return the elements that a rank holds of it, without padding."""
        place = rank // self.experts  # its rank among those that share its experts
        return self._elements(max(0, min(self._piece, self._length - place * self._piece)))

    @property
    def _length(self) -> int:
        if not self.shape:
            return 1
        return self.shape[self.dim] // (self.experts if self.dim == 0 else 1)

    @property
    def _piece(self) -> int:
        return -(-self._length // self.shards)

    def _elements(self, length: int) -> int:
        """Return the elements of a piece that is so long in the dimension that is split."""
        return self.numel // self.experts // self._length * length if self._length else 0


class Rule(NamedTuple):
    """What an optimizer keeps for a parameter (:mod:`torchturbo.optim.kept`), as bytes of fp32."""

    copies: int
    """fp32 tensors of the parameter's shape."""
    scalars: int
    """fp32 scalars."""

    def bytes(self, weight: Weight, rank: int) -> int:
        """Return the bytes of a rank's state for a parameter."""
        return self.copies * weight.held(rank) * 4 + self.scalars * SCALAR if weight.trained else 0


ADAMW, MUON = (Rule(*KEPT[name]({})) for name in ("AdamW", "Muon"))


class Range(NamedTuple):
    """Bytes on the rank that holds the most, and on the one that holds the least."""

    most: int
    least: int

    def __add__(self, other: object) -> Range:
        """Add rank by rank: the same rank holds the most of everything."""
        return Range(self.most + other.most, self.least + other.least) if isinstance(other, Range) else NotImplemented

    @classmethod
    def of(cls, bytes_of: Callable[[int], int], world_size: int) -> Range:
        """Return the bytes of the first rank and of the last."""
        return cls(bytes_of(0), bytes_of(world_size - 1))


def parameter_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of parameters between the steps, the same on every rank."""
    return sum(weight.padded * weight.itemsize for weight in weights)


def gradient_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of reduced gradients, which have their parameters' format, the same on every rank."""
    return sum(weight.padded * weight.itemsize for weight in weights if weight.trained)


def optimizer_bytes(weights: Sequence[Weight], rules: Sequence[Rule], rank: int) -> int:
    """Return the bytes of a rank's optimizer state, a rule for each parameter."""
    return sum(rule.bytes(weight, rank) for weight, rule in zip(weights, rules, strict=True))
