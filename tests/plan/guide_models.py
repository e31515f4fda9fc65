"""The configurations of two public models, as their repositories have them: enough for a plan, without a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def save(folder: Path) -> None:
    """Write both configurations, each into the folder of its model's name."""
    from transformers import AutoConfig

    for name, kind, settings in (("Qwen3-8B", "qwen3", QWEN3_8B), ("Qwen3-30B-A3B", "qwen3_moe", QWEN3_30B_A3B)):
        AutoConfig.for_model(kind, **settings).save_pretrained(folder / name)
