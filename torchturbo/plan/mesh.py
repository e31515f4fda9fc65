"""The mesh as a table: each axis, how many ranks a group has, which they are, and whether a group spans nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchturbo.parallel.mesh import MeshPlan

AXES = {
    "dp": "see different data",
    "sp": "share a sequence",
    "ep_fsdp": "shard one expert set",
    "ep": "divide the experts",
}
"""Every axis, and what the ranks of one of its groups do."""


class Axis(NamedTuple):
    """One axis of the mesh."""

    name: str
    size: int
    """Ranks of a group."""
    stride: int
    """From one rank of a group to the next."""
    groups: int
    spans_nodes: bool
    """Whether some group has ranks on several nodes."""

    @property
    def first_group(self) -> range:
        """Return the ranks of the group that rank 0 is in."""
        return range(0, self.size * self.stride, self.stride)


def axes(plan: MeshPlan, ranks_per_node: int) -> list[Axis]:
    """Return the axes of a mesh, outer ones first: dp x sp, and ep_fsdp x ep of the same ranks."""
    return list(_axes(plan, ranks_per_node))


def _axes(plan: MeshPlan, ranks_per_node: int) -> Iterator[Axis]:
    for outer, size, inner, count in (
        ("dp", plan.dp_size, "sp", plan.sp_size),
        ("ep_fsdp", plan.ep_fsdp_size, "ep", plan.ep_size),
    ):
        yield Axis(outer, size, count, count, size > 1 and plan.world_size > ranks_per_node)
        # Neighbours share a node unless a group begins on one and ends on the next.
        straddles = count > 1 and (count > ranks_per_node or bool(ranks_per_node % count))
        yield Axis(inner, count, 1, size, straddles and plan.world_size > ranks_per_node)


def nodes(world_size: int, ranks_per_node: int) -> int:
    """Return the number of nodes; the last may have fewer ranks."""
    return -(-world_size // ranks_per_node)


def ranks_text(group: range) -> str:
    """Return the ranks of a group as people write them: ``0-3``, ``0, 4, 8 … 60``."""
    if len(group) == 1:
        return str(group[0])
    if group.step == 1 and len(group) > 2:
        return f"{group[0]}-{group[-1]}"
    if len(group) <= 4:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))} … {group[-1]}"
