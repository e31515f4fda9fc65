"""Expert parallelism, family by family: two ranks that share the experts of a model against one process."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import mixtures
import parity
import pytest
from ranks import run_ranks

from torchturbo.parallel.experts import FAMILIES, Family, family_of, find_experts

KINDS = [family.model_type for family in FAMILIES]


def hold_families(rank: int, families: list[Family]) -> None:
    settings = parity.config(parallel_plan={"ep_size": 2})
    for family in families:
        kind = family.model_type
        try:
            found = find_experts(mixtures.build(kind))
            assert found
            assert {family} == {family_of(module) for module in found.values()}
            parity.check(rank, 2, partial(mixtures.build, kind), settings, parity.batches(2, 2, 12))
        except Exception as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize("first", range(0, len(FAMILIES), 6))
def test_each_family_computes_the_same_when_its_experts_are_divided(first: int) -> None:
    """Loss, gradient norm and every gradient, to 2e-6; a rank has no labels at all. The row names the class of the experts."""
    run_ranks(2, hold_families, list(FAMILIES[first : first + 6]))


def test_the_guide_lists_the_table() -> None:
    """Row by row, in its order."""
    guide = Path("docs/guides/expert-parallelism.md").read_text(encoding="utf-8")
    rows = [f"| {family.name} | `{family.model_type}` | `{family.experts}` |" for family in FAMILIES]

    assert rows == [line for line in guide.splitlines() if line.startswith("| ") and "Experts` |" in line]


def test_the_required_families_are_there() -> None:
    """Those that people ask for first."""
    assert {"qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral"} <= set(KINDS)
    assert len(set(KINDS)) == len(KINDS) == len(mixtures.MODELS)


def test_the_picture_is_the_one_that_is_drawn() -> None:
    """The committed file is what its code draws."""
    code = runpy.run_path("docs/pictures/expert_parallelism.py")

    assert code["drawing"]() == code["FILE"].read_text(encoding="utf-8")
