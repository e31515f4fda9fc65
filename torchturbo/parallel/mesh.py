"""The mesh: how the ranks of a run are grouped for data, sequences and experts.

Two views of the same ranks, after https://arxiv.org/abs/2304.11277 (FSDP), DeepSpeed-Ulysses (arXiv 2309.14509) and
GShard's expert parallelism (arXiv 2006.16668): ``dp x sp`` for all parameters but the experts', ``ep_fsdp x ep`` for
those. Parameters are sharded over *all* ranks of a view, and gradients are summed over all of them; the last axis is
the fastest, so that the ranks that exchange most (sequence, expert) are neighbours.

    rank = dp_rank * sp_size + sp_rank = ep_fsdp_rank * ep_size + ep_rank

The arithmetic needs no torch: ``torchturbo plan`` does it for any number of ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchturbo.engine.config import EngineConfig

SP_SIZE, EP_SIZE = "parallel_plan.sp_size", "parallel_plan.ep_size"


@dataclass(frozen=True)
class MeshPlan:
    """The sizes of all axes."""

    world_size: int = 1
    """All ranks."""
    sp_size: int = 1
    """Ranks that share one sequence."""
    ep_size: int = 1
    """Ranks that share one set of experts."""

    @classmethod
    def of(cls, config: EngineConfig, world_size: int) -> MeshPlan:
        """Return the plan that a configuration asks for; see :func:`mesh_problems` for whether it can be."""
        return cls(world_size, config.parallel_plan.sp_size, config.parallel_plan.ep_size)

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that see different data."""
        return self.world_size // self.sp_size

    @property
    def ep_fsdp_size(self) -> int:
        """Return the number of ranks over which one rank's experts are sharded."""
        return self.world_size // self.ep_size

    def dp_rank(self, rank: int) -> int:
        """Return which share of the data a rank sees."""
        return rank // self.sp_size

    def sp_rank(self, rank: int) -> int:
        """Return which part of its group's sequences a rank computes."""
        return rank % self.sp_size

    def ep_fsdp_rank(self, rank: int) -> int:
        """Return which shard of its experts a rank stores."""
        return rank // self.ep_size

    def ep_rank(self, rank: int) -> int:
        """Return which experts a rank computes."""
        return rank % self.ep_size

    def __str__(self) -> str:
        if self.world_size == 1:
            return "one process"
        experts = f", experts ep_fsdp {self.ep_fsdp_size} x ep {self.ep_size}" if self.ep_size > 1 else ""
        return f"{self.world_size} ranks = dp {self.dp_size} x sp {self.sp_size}{experts}"


def is_sharded(config: EngineConfig, world_size: int) -> bool:
    """Return whether FSDP2 holds the parameters: always with several ranks, and where one process offloads them."""
    return world_size > 1 or is_offloaded(config)


def is_offloaded(config: EngineConfig) -> bool:
    """Return whether FSDP2 keeps parameters, gradients and optimizer state in host memory."""
    offload = config.backend_config.cpu_offload
    return offload.enabled and offload.mode == "all"


def mesh_problems(config: EngineConfig, world_size: int) -> list[Problem]:
    """Return what keeps this many ranks from forming the groups that a configuration asks for, all at once."""
    sizes = ((SP_SIZE, "a sequence", "dp_size"), (EP_SIZE, "a set of experts", "ep_fsdp_size"))
    problems = []
    for path, shared, other in sizes:
        size = config.get(path)
        if world_size % size:
            message = (
                f"{size} ranks share {shared}, but {other} = world_size / {path.rpartition('.')[2]}"
                f" = {world_size} / {size} = {world_size / size:g} is no whole number"
            )
            nearest = " or ".join(map(str, nearest_divisors(size, world_size)))
            ranks = " or ".join(map(str, nearest_multiples(world_size, size)))
            problems.append(Problem(config.origin(path).place, path, message, f"use {nearest}, or {ranks} ranks"))
    return problems


def nearest_divisors(size: int, whole: int) -> list[int]:
    """Return the divisors of ``whole`` next to ``size``, the smaller first; ``size`` alone where it is one itself."""
    divisors = [value for value in range(1, whole + 1) if whole % value == 0]
    below = [value for value in divisors if value <= size]
    above = [value for value in divisors if value >= size]
    return list(dict.fromkeys([*below[-1:], *above[:1]]))


def nearest_multiples(whole: int, size: int) -> list[int]:
    """Return the multiples of ``size`` next to ``whole``, the smaller first, each at least one ``size``."""
    below = whole // size * size
    return [value for value in dict.fromkeys((below, below + (size if whole % size else 0))) if value >= size]


@dataclass(frozen=True)
class Meshes:
    """The process groups of a plan, as device meshes; see :meth:`build`."""

    plan: MeshPlan
    fsdp: DeviceMesh
    """All ranks, one axis: what every parameter but the experts' is sharded over, and its gradient summed over."""
    dp: DeviceMesh
    """The ranks of this rank's place in its sequence group: they see different data."""
    sp: DeviceMesh
    """The ranks that share this rank's sequences."""
    experts: DeviceMesh
    """All ranks, two axes ``("ep_fsdp", "ep")``."""

    @property
    def ep_fsdp(self) -> DeviceMesh:
        """The ranks that hold shards of this rank's experts."""
        return self.experts["ep_fsdp"]

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that hold the other experts."""
        return self.experts["ep"]

    @classmethod
    def build(cls, plan: MeshPlan, device_type: str, backend: str | None = None) -> Meshes:
        """Make the process groups of a plan, or return those made before. A collective: every rank has the same plan.

        ``backend`` is that of the groups of parameters, such as ``cpu:gloo,cuda:nccl``; the default group's without.
        """
        import torch.distributed as dist

        return _meshes(dist.group.WORLD, plan, device_type, backend)


@functools.cache
def _meshes(world: object, plan: MeshPlan, device_type: str, backend: str | None) -> Meshes:
    """Make the groups once for each world: every trainer of a process would leave its own behind."""
    from torch.distributed.device_mesh import init_device_mesh

    def made(sizes: tuple[int, ...], names: tuple[str, ...], backend: str | None) -> DeviceMesh:
        override: Any = dict.fromkeys(names, backend) if backend is not None else None
        return init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=override)

    data = made((plan.dp_size, plan.sp_size), ("dp", "sp"), None)
    experts = made((plan.ep_fsdp_size, plan.ep_size), ("ep_fsdp", "ep"), backend)
    every = made((plan.world_size,), ("fsdp",), backend)
    return Meshes(plan, every, data["dp"], data["sp"], experts)
