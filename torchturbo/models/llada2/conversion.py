"""How LLaDA2-MoE's published weights become the model's: each layer's experts, one by one on disk, are stacked.

All other tensors have the same names on both sides; queries, keys and values are one matrix on both. Transformers turns
the same table round when it saves.
"""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


def conversions() -> list[Any]:
    """Return the table: E matrices [I, H] each of gate and up become [E, 2 I, H], and E of down [E, H, I]."""
    return [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]


def register_conversions(model_type: str) -> None:
    """Have Transformers use the table for a model type, in loading and in saving; again does nothing."""
    if get_checkpoint_conversion_mapping(model_type) is None:
        register_checkpoint_conversion_mapping(model_type, conversions())
