"""DeepSeek-V4's DSpark stages: decoder blocks that draft several tokens at once, out of the model's own inner states.

Features of the tapped layers, the mean over their parallel streams, become the context of every stage:
``c = main_norm(main_proj([f_1; …; f_m]))``. The queries are the slots of draft blocks alone. A slot of the block anchored
at p sees the keys of ``c`` at ``[p - W, p - 1]``, W the model's sliding window, and all slots of its own block; keys and
values are one latent, turned by the model's plain rotary embedding, and there is a learned sink, as in the model's own
attention. After the last stage ``j = hc_head(x)`` joins the streams: ``norm(j)`` goes to the model's head, and ``j`` to the
confidence head. After the inference code in https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-DSpark, SGLang's
``deepseek_v4_dspark.py`` and Tencent/G-Core-GH's ``deepseek_v4/dspark.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    apply_rotary_pos_emb,
)

from torchturbo.objectives import deepseek_v4

Rotary = tuple[Tensor, Tensor]


@dataclass
class Window:
    """What every stage is told of the blocks of one forward."""

    index: Tensor
    """[B, A, W]: the positions before each anchor, of those that exist."""
    visible: Tensor
    """[B, A, W]: which of them a block sees."""
    context: Rotary
    """Cosines and sines [B, S, D / 2] at the context's positions."""
    blocks: Rotary
    """The same [B, A * K, D / 2] at the slots'."""


class StageAttention(DeepseekV4Attention):
    """V4's attention, for blocks of queries of which each sees a window of the context and itself.

    All queries of a block share their keys, so that those are gathered once a block: [B, A, W + K] of them instead of a
    mask [A * K, S + A * K]. V4 has one head of keys, and so all heads of all slots are rows of one matrix product.
    """

    def forward(
        self, hidden_states: Tensor, context: Tensor, window: Window, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the slots [B, A * K, H] attend to in the context [B, S, H] and in their own block."""
        rows, tokens = hidden_states.shape[:2]
        blocks, heads = window.index.shape[1], self.num_heads
        cos, sin = window.blocks
        query = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states))).view(rows, tokens, heads, self.head_dim)
        query = apply_rotary_pos_emb(self.q_b_norm(query), cos, sin, unsqueeze_dim=2)
        before = self._latent(context, window.context)[torch.arange(rows)[:, None, None], window.index]
        itself = self._latent(hidden_states, window.blocks).view(rows, blocks, -1, self.head_dim)
        latent = torch.cat((before, itself), 2)
        seen = torch.cat((window.visible, window.visible.new_ones(itself.shape[:3])), 2)
        scores = query.view(rows, blocks, -1, self.head_dim) @ latent.transpose(2, 3) * self.scaling
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        sinks = self.sinks.repeat(tokens // blocks)[:, None].expand(rows, blocks, -1, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(latent.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = nn.functional.dropout(weights, dropout) @ latent
        mixed = apply_rotary_pos_emb(mixed.view(rows, tokens, heads, -1), cos, -sin, unsqueeze_dim=2)
        grouped = self.o_a_proj(mixed.reshape(rows, tokens, self.config.o_groups, -1))
        return self.o_b_proj(grouped.flatten(2)), None

    def _latent(self, states: Tensor, rotary: Rotary) -> Tensor:
        """Return the keys, which are the values, too, of states [B, T, H]: [B, T, D]."""
        return apply_rotary_pos_emb(self.kv_norm(self.kv_proj(states)).unsqueeze(1), *rotary).squeeze(1)


class Stage(DeepseekV4DecoderLayer):
    """One stage: V4's decoder block with :class:`StageAttention`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = StageAttention(config, layer_idx)

    def forward(self, slots: Tensor, context: Tensor, **kwargs: Any) -> Tensor:
        """Return the streams [B, A * K, hc, H] of the slots; both tensors come by position, for reentrant checkpointing."""
        left: Tensor = super().forward(slots, context=context, **kwargs)
        return left
