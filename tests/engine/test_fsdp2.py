"""FSDP2 on two and four ranks beside one process: the same loss, norm and gradients."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
from ranks import run_ranks


def cases(rank: int, world_size: int, kind: str, changes: dict[str, Any], settings: Any, accumulation: int) -> None:
    window = parity.batches(accumulation * world_size)
    parity.check(rank, world_size, lambda: tiny.model(kind, **changes), settings, window)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {"tie_word_embeddings": True}), ("qwen3", {"tie_word_embeddings": False}), ("qwen3_moe", {})],
    ids=["tied", "untied", "moe"],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_those_of_one_process(
    world_size: int, kind: str, changes: dict[str, Any], accumulation: int
) -> None:
    """With ragged labels, and a rank whose last micro-batch holds no target."""
    run_ranks(world_size, cases, world_size, kind, changes, parity.config(), accumulation)
