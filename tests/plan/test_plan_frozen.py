"""Plans of a model that is frozen, beside which a draft alone is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

DRAFT = {"block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": 319, "markov_rank": 4} | {
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip


@pytest.mark.parametrize("chunked", [[], ["--tt_enable_chunk_loss"]], ids=["whole", "chunked"])
def test_a_frozen_target_has_activations(chunked: list[str], tmp_path: Path, plan: Callable[..., Any]) -> None:
    """Nothing of the model goes backward."""
    tiny.model("qwen3", dspark_config=DRAFT).save_pretrained(tmp_path / "model")
    frozen = ["--tt_enable_mtp", "--tt_freeze_language_model", *chunked]

    done = plan("--world_size", 2, "--model", tmp_path / "model", *frozen)

    assert 0 == done.status
    assert "RuntimeError" not in done.out
