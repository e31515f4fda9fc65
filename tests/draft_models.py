"""A tiny model that is the target of a draft, by the settings in its configuration."""

from __future__ import annotations

from typing import Any

import tiny

DRAFT: dict[str, Any] = {
    "block_size": 3, "num_hidden_layers": 2, "num_draft_layers": 2, "target_layer_ids": [-1, 0], "mask_token_id": 3,
    "markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "num_anchors": 4,
}  # fmt: skip
"""DeepSpec's fields."""


def target(**changes: Any) -> Any:
    """Return a random Qwen3 whose configuration speaks of a draft of two layers."""
    model = tiny.model("qwen3", **changes)
    model.config.dspark_config = dict(DRAFT)
    return model
