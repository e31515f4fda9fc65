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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

from torchturbo.objectives import deepseek_v4
from torchturbo.objectives.dspark.backbone import Draft, DraftStates
from torchturbo.objectives.dspark.confidence import ConfidenceHead
from torchturbo.objectives.dspark.markov import MarkovHead
from torchturbo.objectives.dspark.values import ascending, slots, whole
from torchturbo.objectives.dspark.visibility import Visibility
from torchturbo.objectives.planned import Planned, Stored

FIELDS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
"""What a configuration says of the stages."""
Rotary = tuple[Tensor, Tensor]


class Window(NamedTuple):
    """What every stage is told of the blocks of one forward."""

    places: Tensor
    """[B, A, W]: index in its row of each token before an anchor; 0 where there is none."""
    visible: Tensor
    """[B, A, W]: which of them a block sees."""
    context: Rotary
    """Cosines and sines [B, S, D / 2] at the context's positions."""
    blocks: Rotary
    """The same [B, A * K, D / 2] at the slots'."""


class StageAttention(DeepseekV4Attention):  # type: ignore[misc]  # untyped there
    """V4's attention, for blocks of queries of which each sees a window of the context and itself.

    All queries of a block share their keys, so that those are gathered once a block: [B, A, W + K] of them instead of a
    mask [A * K, S + A * K]. V4 has one head of keys, and so all heads of all slots are rows of one matrix product.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, context: Tensor, window: Window, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the slots [B, A * K, H] attend to in the context [B, S, H] and in their own block."""
        rows, tokens = hidden_states.shape[:2]
        blocks, heads = window.places.shape[1], self.num_heads
        cos, sin = window.blocks
        query = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states))).view(rows, tokens, heads, self.head_dim)
        query = apply_rotary_pos_emb(self.q_b_norm(query), cos, sin, unsqueeze_dim=2)
        before = self._latent(context, window.context)[
            torch.arange(rows, device=window.places.device)[:, None, None], window.places
        ]
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
        turned: Tensor = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(states)).unsqueeze(1), *rotary)
        return turned.squeeze(1)


class Stage(DeepseekV4DecoderLayer):  # type: ignore[misc]  # untyped there
    """One stage: V4's decoder block with :class:`StageAttention`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = StageAttention(config, layer_idx)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, slots: Tensor, context: Tensor, **kwargs: Any
    ) -> Tensor:
        """Return the streams [B, A * K, hc, H] of the slots; both tensors come by position, for reentrant checkpointing."""
        given: Any = {"context": context, **kwargs}
        left: Tensor = super().forward(slots, **given)
        return left


class DeepseekV4Draft(Draft):
    """The stages of a DeepSeek-V4 model, and what stands before and behind them."""

    pattern = deepseek_v4.PATTERN

    def __init__(self, config: Any, stages: int, copies: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.copies = copies or {}
        self.block_size, self.mask_token_id = config.dspark_block_size, config.dspark_noise_token_id
        self.taps = tuple(config.dspark_target_layer_ids)
        self.streams, self.window = config.hc_mult, config.sliding_window
        size, rank = config.hidden_size, config.dspark_markov_rank
        self.main_proj = nn.Linear(len(self.taps) * size, size, bias=False)
        self.main_norm, self.norm = (
            DeepseekV4RMSNorm(size, config.rms_norm_eps).to(torch.float32) for _ in ("before", "behind")
        )
        self.layers = deepseek_v4.blocks(Stage, config, stages)
        self.hc_head = DeepseekV4HyperHead(config).to(torch.float32)
        self.markov_head = MarkovHead(config.vocab_size, rank, size)
        self.confidence_head = ConfidenceHead(size, rank, bias=False)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        last = stages - 1
        ends = [("0.main_proj.", "main_proj."), ("0.main_norm.", "main_norm.")]
        ends += [(f"{last}.{name}", name) for name in ("norm.", "hc_head_", "markov_head.", "confidence_head.")]
        self.transforms = deepseek_v4.transforms(ends)
        self.units = tuple(f"layers.{at}" for at in range(stages))

    @property
    def markov(self) -> MarkovHead:
        """Return the head that biases a slot's logits by the token before."""
        return self.markov_head

    @property
    def confidence(self) -> ConfidenceHead:
        """Return the head that foretells whether a slot's token is accepted."""
        return self.confidence_head

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the features [B, S, m*H] of the m tapped layers' outputs [B, S, hc, H]: the mean over their streams."""
        return torch.cat([state.mean(2) for state in states], -1)

    def forward(self, features: Tensor, embedded: Tensor, visibility: Visibility) -> DraftStates:
        """Return the hidden states of all slots; the confidence head looks at the ones before the last norm."""
        context = self.main_norm(self.main_proj(features))
        slots = deepseek_v4.streams(embedded.flatten(1, 2), self.streams)
        window = self._window(features, visibility)
        for stage in self.layers:
            slots = stage(slots, context, window=window)
        joined = self.hc_head(slots)
        return DraftStates(self.norm(joined).view_as(embedded), joined.view_as(embedded))

    def _window(self, like: Tensor, visibility: Visibility) -> Window:
        anchors, documents = visibility.anchors, visibility.documents
        width = min(self.window, documents.shape[1])
        places = anchors[..., None] + torch.arange(-width, 0, device=anchors.device)
        exists, places = places >= 0, places.clamp(min=0)
        same = documents.gather(1, places.flatten(1)).view_as(places) == documents.gather(1, anchors)[..., None]
        rotary: Any = partial(self.rotary_emb, like, layer_type="main")
        return Window(
            places,
            exists & same & visibility.keep[..., None],
            rotary(position_ids=visibility.context_positions),
            rotary(position_ids=visibility.positions.flatten(1)),
        )


def find(base: Any, stored: Stored) -> Planned | None:
    """Return the stages that a DeepSeek-V4 model is to get; None for one whose configuration says nothing of DSpark.

    How many there are stands in the names of its files, or else is the number of tapped layers.
    ``num_nextn_predict_layers`` counts serial heads, and is 1 beside three stages.
    """
    config = base.config
    lacking = [name for name in FIELDS if getattr(config, name, None) is None]
    if config.model_type != deepseek_v4.MODEL_TYPE or len(lacking) == len(FIELDS):
        return None
    stages = _tapped(config) if stored is None else deepseek_v4.count(stored)
    kind = f"{stages} DSpark stages of DeepSeek-V4" if stages else "DSpark stages of DeepSeek-V4"
    if obstacle := _obstacle(config, lacking, stages, stored):
        return Planned(kind, obstacle=obstacle[0], remedy=obstacle[1])
    return Planned(kind, partial(_built, stages, stored))


def _built(stages: int, stored: Stored, base: Any) -> DeepseekV4Draft:
    return DeepseekV4Draft(base.config, stages, deepseek_v4.copies(base, stored or ()))


def _tapped(config: Any) -> int:
    """Return the number of tapped layers; 0 where they are no list."""
    taps = config.dspark_target_layer_ids
    return len(taps) if isinstance(taps, list | tuple) else 0


def _obstacle(config: Any, lacking: list[str], stages: int, stored: Stored) -> tuple[str, str] | None:
    """Return what keeps a model from having the stages, and what to do."""
    gap = deepseek_v4.gap(stored or ())
    if (other := deepseek_v4.other_architecture(config, stages, None if gap else stored)) is not None:
        return other, "train it without, or use a DeepSeek-V4 checkpoint"
    wrong = [f"its config.json says nothing of {', '.join(lacking)}"] if lacking else []
    wrong += _wrong(config, lacking)
    if wrong:
        return "; ".join([*wrong, *([gap] if gap else [])]), "mend its config.json"
    if gap is None and stages == 0:
        gap = "its files hold no tensor mtp.0.*"
    return (gap, "use a checkpoint that has them") if gap else None


def _wrong(config: Any, lacking: list[str]) -> list[str]:
    """Return what the stages can't be built with, of the :data:`FIELDS` that a configuration has."""
    last, vocabulary = config.num_hidden_layers - 1, config.vocab_size
    checks: dict[str, Any] = {
        "dspark_block_size": lambda name, value: slots(name, value, config),
        "dspark_noise_token_id": lambda name, value: whole(name, value, 0, vocabulary - 1, "the vocabulary's last"),
        "dspark_target_layer_ids": lambda name, value: ascending(name, value, 0, last, f"from 0 to {last}"),
        "dspark_markov_rank": lambda name, value: whole(name, value, 1, vocabulary, "the vocabulary"),
    }
    return [
        problem
        for name, check in checks.items()
        if name not in lacking
        for problem in check(name, getattr(config, name))
    ]
