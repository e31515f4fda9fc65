"""DeepSeek-V4's heads for multi-token prediction: they go on from the model's parallel streams, before those are joined.

Depth k, of streams ``x`` [B, S, hc, H] that the depth before left (the last decoder layer, for k = 1):
``x' = Block_k(e_proj(enorm(Emb(t_{i+k}))) + h_proj(hnorm(x)))``, the embedding added to each stream, and
``h^k = norm(hc_head(x'))``, with a norm and a join of its own, from which the model's head makes logits. ``x'`` goes on to
depth k + 1. After the inference code in https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash and vLLM's
``deepseek_v4_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
)

from torchturbo.objectives import deepseek_v4
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.objectives.taps import Call


class Depth(DeepseekV4DecoderLayer):  # type: ignore[misc]  # untyped there
    """One head: a decoder block between what mixes the next embedding in and what joins the streams."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(size, eps).to(torch.float32) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.hc_head = DeepseekV4HyperHead(config).to(torch.float32)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: Tensor, embedded: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the streams [B, S, hc, H] for the next depth, and the hidden states [B, S, H] for the model's head.

        ``state`` [B, S, hc, H] and ``embedded`` [B, S, H] come by position: reentrant checkpointing sees no others.
        """
        mixed = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(state))
        left = super().forward(mixed, **kwargs)
        return left, self.norm(self.hc_head(left))


class DeepseekV4Heads(SerialHeads):
    """The heads of a DeepSeek-V4 model."""

    pattern = deepseek_v4.PATTERN

    def __init__(self, config: Any, depths: int, copies: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.copies = copies or {}
        self.depths = depths
        self.layers = deepseek_v4.blocks(Depth, config, depths)
        self.transforms = deepseek_v4.transforms()
        self.units = tuple(f"layers.{at}" for at in range(depths))

    def watched(self, base: nn.Module) -> Mapping[str, nn.Module]:
        """Return the last layer, for its arguments, and what joins the model's streams, which it gets with their graph."""
        body: Any = getattr(base, "base_model", base)
        return {"layer": body.layers[-1], "join": body.hc_head}

    def first(self, calls: Mapping[str, Call]) -> Tensor:
        """Return the streams [B, S, hc, H] that the model's last layer left."""
        streams: Tensor = calls["join"].args[0]
        return streams

    def depth(self, at: int, state: Tensor, embedded: Tensor, calls: Mapping[str, Call]) -> tuple[Tensor, Tensor]:
        """Run one head with the masks and positions of the model's layers, whose window is the heads'."""
        given = {name: value for name, value in calls["layer"].kwargs.items() if name != "input_ids"}
        made: tuple[Tensor, Tensor] = self.layers[at](state, embedded, **given)
        return made


def build(base: Any, family: Any, heads: int, stored: Any) -> DeepseekV4Heads:
    """Return so many heads for a DeepSeek-V4 model, without weights of their own yet."""
    return DeepseekV4Heads(base.config, heads, deepseek_v4.copies(base, stored or ()))
