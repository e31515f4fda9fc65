"""Batch arithmetic: from the global batch and the ranks to accumulation steps, as pure functions.

Words: a *micro-batch* is what one rank forwards at once; ``gbs`` counts the micro-batches of one optimizer step over
all data-parallel ranks; the ranks of one sequence-parallel group share a micro-batch and so count once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchturbo.errors import Problem


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step, counted."""

    micro_batch: int
    """Sequences in one forward of one rank (``per_device_train_batch_size``)."""
    accumulation: int
    """Micro-batches a rank accumulates before the optimizer steps."""
    world_size: int
    """All ranks."""
    sp_size: int = 1
    """Ranks that share one micro-batch."""

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that see different data."""
        return self.world_size // self.sp_size

    @property
    def gbs(self) -> int:
        """Return the micro-batches of one optimizer step."""
        return self.accumulation * self.dp_size

    @property
    def sequences(self) -> int:
        """Return the sequences (rows) of one optimizer step."""
        return self.micro_batch * self.gbs

    def steps(self, rows: int, epochs: float, *, drop_last: bool = False) -> int:
        """Return the optimizer steps of some passes over a dataset; each epoch's last step may be a smaller one."""
        per_round = self.micro_batch * self.dp_size
        rounds = rows // per_round if drop_last else math.ceil(rows / per_round)
        return math.ceil(epochs * max(1, math.ceil(rounds / self.accumulation)))

    def __str__(self) -> str:
        return (
            f"micro-batch {self.micro_batch} x accumulation {self.accumulation} x data-parallel ranks {self.dp_size}"
            f" = {self.sequences} sequences per step"
        )


def accumulation_steps(gbs: int, world_size: int, sp_size: int = 1) -> int | None:
    """Return ``gbs * sp_size / world_size`` where that is a whole number of at least one step, else None."""
    steps, rest = divmod(gbs * sp_size, world_size)
    return steps if steps and not rest else None


def nearest_gbs(gbs: int, world_size: int, sp_size: int = 1) -> list[int]:
    """Return the valid values of ``gbs`` next to the one given, smaller first; none where sp_size does not divide."""
    dp_size, rest = divmod(world_size, sp_size)
    if rest or dp_size < 1:
        return []
    below = gbs // dp_size * dp_size
    return [value for value in dict.fromkeys((below, below + dp_size)) if value >= dp_size]


def batch_problem(gbs: int, world_size: int, sp_size: int = 1, *, place: str = "") -> Problem | None:
    """Return what is wrong with a global batch on this many ranks, or None.

    Every factor is in the message: the reader has the launch command, the file and the variable to choose from.
    ``sp_size`` divides ``world_size`` (:func:`torchturbo.parallel.mesh.mesh_problems` says where it does not).
    """
    if accumulation_steps(gbs, world_size, sp_size) is not None:
        return None
    return Problem(
        place,
        "gbs",
        f"accumulation = gbs * sp_size / world_size = {gbs} * {sp_size} / {world_size}"
        f" = {gbs * sp_size / world_size:g} is no whole number of steps",
        f"use {' or '.join(map(str, nearest_gbs(gbs, world_size, sp_size)))} (a multiple of the"
        f" {world_size // sp_size} data-parallel ranks), or another number of ranks",
    )
