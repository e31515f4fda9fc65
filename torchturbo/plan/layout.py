"""The part of a plan that the configuration alone tells: the mesh and the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchturbo.adapters import base
from torchturbo.engine.config import config_of
from torchturbo.parallel.batch import BatchPlan
from torchturbo.parallel.mesh import MeshPlan, mesh_problems
from torchturbo.plan.mesh import axes

if TYPE_CHECKING:
    from torchturbo.config.merge import Merged
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plan.report import Plan


def configuration(merged: Merged, plan: Plan) -> EngineConfig | None:
    """Return the configuration of merged layers where they make one; what is wrong with them goes into the plan.

    Where they make none, the sizes of the mesh can be told wrong all the same: each is held against the ranks alone.
    The batch is not, since a mistyped option may have been meant to change what it has to be.
    """
    plan.errors += merged.problems
    if not merged.problems:
        return config_of(merged)
    plan.errors += mesh_problems(config_of(merged._replace(problems=[])), plan.world_size)
    return None


def lay_out(config: EngineConfig, micro_batch: int, accumulation: int, plan: Plan) -> None:
    """Put the mesh and the batch into a plan, as far as the numbers allow."""
    if not mesh_problems(config, plan.world_size):
        plan.axes = axes(MeshPlan.of(config, plan.world_size), plan.ranks_per_node)
    batch = base.plan_batch(config, micro_batch, accumulation, plan.world_size)
    if isinstance(batch, BatchPlan):
        plan.batch = batch
    else:
        plan.errors += batch
