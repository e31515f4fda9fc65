"""Muon on shards against one process and against the slow reference, after three steps with real gradients."""

from __future__ import annotations

import muon_models
import pytest
from muon_models import Case, Reference, both, gradients, optimizer, weights, worst
from ranks import run_ranks
from torch.distributed.tensor import Shard

TOLERANCE = 1e-5
"""Relative error of every weight after three steps, with Newton-Schulz in fp32."""

PAIRS = {
    1: [Case("qwen3"), Case("qwen3_moe")],
    2: [Case("qwen3"), Case("qwen3_moe", ep=2), Case("qwen3_moe", expert_placements=(Shard(0), Shard(0)))],
    4: [Case("qwen3_moe", ep=2), Case("qwen3_moe", ep=4)],
}
GRID = [
    (world, Case(kind, ep, placements))
    for world in (1, 2, 4)
    for kind in ("qwen3", "qwen3_moe", "mixtral")
    for ep in (1, 2, 4)
    for placements in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(2), Shard(0)))
    if world % ep == 0 and (kind != "qwen3" or (ep == 1 and placements == (Shard(1), Shard(0))))
]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_one_process_is_the_reference(kind: str) -> None:
    """Weight by weight and step by step, in fp32 against float64."""
    model = muon_models.model(kind)
    reference, stepper = Reference(model), optimizer(model)

    for step in range(3):
        reference.step(gradients(model, step))
        stepper.step()

        assert worst(weights(model), reference.weights(model)) < TOLERANCE


def cases(rank: int, world_size: int, wanted: list[Case]) -> list[tuple[float, float]]:
    return [both(rank, world_size, case) for case in wanted]


@pytest.mark.parametrize("world_size", PAIRS)
def test_shards_are_one_process_and_the_reference(world_size: int) -> None:
    """Dense and experts, in each layout that the engine makes."""
    for found in run_ranks(world_size, cases, world_size, PAIRS[world_size]):
        for one, reference in found:
            assert one < TOLERANCE
            assert reference < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "case"), GRID, ids=str)
def test_every_layout(world_size: int, case: Case) -> None:
    """The whole grid."""
    for found in run_ranks(world_size, cases, world_size, [case]):
        assert max(found[0]) < TOLERANCE
