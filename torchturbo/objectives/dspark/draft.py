"""The standalone draft of a dense target: a few Qwen3 layers whose attention also looks into the target's states.

Each layer is Transformers' own, called with blocks [B, A*K, H] as its sequence. The context's keys and values come in
where a cache's would: made of ``hidden_norm(fc(features))`` by the layer's own projections, norm and rotation. Names
and architecture are those of DeepSpec's ``Qwen3DSparkModel``
(https://github.com/deepseek-ai/DeepSpec, ``deepspec/modeling/dspark/qwen3/modeling.py``), without its copies of the
target's embeddings and head: here the target's own are used, and an export adds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from torchturbo.objectives.dspark import files
from torchturbo.objectives.dspark.backbone import Draft, DraftStates
from torchturbo.objectives.dspark.confidence import ConfidenceHead
from torchturbo.objectives.dspark.markov import KINDS, MarkovHead
from torchturbo.objectives.dspark.visibility import Visibility

Rotary = tuple[Tensor, Tensor]


class DraftLayer(Qwen3DecoderLayer):  # type: ignore[misc]  # mypy takes Transformers' decorators for Any
    """A Qwen3 layer for blocks that see a context."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Not the model's: whatever switches the target's attention must leave a draft's alone, whose masks differ.
        attention: Any = self.self_attn
        attention.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, slots: Tensor, context: Tensor, mask: Any, implementation: str, rotary: Rotary, context_rotary: Rotary
    ) -> Tensor:
        """Return the states [B, A*K, H] of the slots.

        What may want gradients, ``slots`` [B, A*K, H] and ``context`` [B, S, H], comes by position, as reentrant
        checkpointing needs it; the mask is one of slots over context and slots, as ``implementation`` takes it.
        """
        attention: Any = self.self_attn
        attention.config._attn_implementation = implementation
        shape = (*context.shape[:2], -1, attention.head_dim)
        key = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
        value = attention.v_proj(context).view(shape).transpose(1, 2)
        _, key = apply_rotary_pos_emb(key, key, *context_rotary)
        given: dict[str, Any] = {_cache_name(): Before(key, value)}
        states: Any = super().forward(slots, attention_mask=mask, position_embeddings=rotary, **given)
        return states if isinstance(states, Tensor) else states[0]


@lru_cache
def _cache_name() -> str:
    """Return by which name attention takes a cache; the older one is the longer."""
    known = inspect.signature(inspect.unwrap(Qwen3Attention.forward)).parameters
    return "cache" if "cache" in known else "past_key_values"


class Before:
    """Keys and values [B, N, S, D] that stand before an attention's own, in the place of a cache."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Rotary:
        """Return the keys and values that a query can see, these first."""
        return torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)


class DenseDraft(Draft):
    """DeepSpec's draft for a dense target.

    Parameters
    ----------
    config
        A ``Qwen3Config`` with DeepSpec's fields, checked: :mod:`torchturbo.objectives.dspark.settings`.
    weights
        Safetensors files with its weights; none for one that begins anew.

    """

    beside = True

    def __init__(self, config: Any, weights: Sequence[Path] = ()) -> None:
        super().__init__()
        self.config = config
        self.files = tuple(weights)
        self.made_new = not weights
        self.block_size, self.mask_token_id = int(config.block_size), int(config.mask_token_id)
        self.taps = tuple(config.target_layer_ids)
        hidden, rank = config.hidden_size, int(config.markov_rank)
        self.layers = nn.ModuleList([DraftLayer(config, at) for at in range(config.num_hidden_layers)])
        self.units = tuple(f"layers.{at}" for at in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.markov_head: MarkovHead | None = None
        if rank:
            self.markov_head = KINDS[config.markov_head_type](config.vocab_size, rank, hidden)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(hidden, rank if config.confidence_head_with_markov else 0)

    @property
    def markov(self) -> MarkovHead | None:
        """Return the Markov head."""
        return self.markov_head

    @property
    def confidence(self) -> ConfidenceHead | None:
        """Return the confidence head."""
        return self.confidence_head

    def forward(self, features: Tensor, embedded: Tensor, visibility: Visibility) -> DraftStates:
        """Return the hidden states of all slots; see :meth:`torchturbo.objectives.dspark.backbone.Draft.forward`."""
        context = self.hidden_norm(self.fc(features))
        slots, positions = embedded.flatten(1, 2), visibility.positions.flatten(1, 2)
        implementation = visibility.implementation(self.config.head_dim)
        mask = visibility.mask(implementation)
        rotary, context_rotary = self._rotary(slots, positions), self._rotary(context, visibility.context_positions)
        for layer in self.layers:
            slots = layer(slots, context, mask, implementation, rotary, context_rotary)
        states = self.norm(slots).view_as(embedded)
        return DraftStates(states, states)

    def _rotary(self, states: Tensor, positions: Tensor) -> Rotary:
        """Return cosines and sines [B, T, D] of positions [B, T], in the states' format.

        Their frequencies are no buffer of the draft, which would be cast with its weights.
        """
        with states.device:
            rotary = Qwen3RotaryEmbedding(self.config)
        found: Rotary = rotary(states, positions)
        return found

    def export_beside(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the draft as DeepSpec's ``Qwen3DSparkModel.from_pretrained`` reads it, into a subfolder ``dspark``."""
        files.write(folder, self.config, tensors)
