"""Tiny targets with a draft, and the slow oracle of a draft's loss: every block alone, after its prefix, slot by slot."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import parity
import tiny
import torch
from torch import Tensor

from torchturbo.objectives.dspark.anchors import Sequences, draw
from torchturbo.objectives.heads import extra_heads

SPEC: dict[str, Any] = {
    "block_size": 3, "num_hidden_layers": 2, "target_layer_ids": [-1, 0], "mask_token_id": 319, "markov_rank": 6,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
"""A draft's settings."""
OFFICIAL = {"num_anchors": 512, "gamma": 4.0, "ce": 0.1, "l1": 0.9, "confidence": 1.0}
"""DeepSpec's."""


def model(kind: str = "qwen3", seed: int = 0, spec: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """Return a random tiny target whose configuration asks for a draft; larger weights make the draft matter."""
    settings = {"initializer_range": 0.2, "dspark_config": SPEC | dict(spec or {})}
    return tiny.model(kind, seed=seed, **(settings | changes))


def settings(**changes: Any) -> Any:
    """Return an engine's configuration with the draft's term alone at weight 1, and few anchors."""
    dspark = {"loss_scaling_factor": 1.0, "num_anchors": 4} | changes.pop("dspark", {})
    return parity.config(mtp={"enabled": True}, dspark=dspark, **changes)


def packed(count: int, length: int = 16, seed: int = 3) -> list[dict[str, Tensor]]:
    """Return micro-batches of two rows, each of documents of unequal length with their positions."""
    made = parity.batches(count, length=length, seed=seed)
    for at, batch in enumerate(made):
        cuts = [5 + at, 9]
        positions = [[*range(cut), *range(length - cut)] for cut in cuts]
        batch["position_ids"] = torch.tensor(positions)
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][0, 2] = -100
    return made


class Numbers(NamedTuple):
    """What the oracle finds for one micro-batch."""

    numerator: Tensor
    denominator: float
    accepted: list[list[float]]
    """The chances of acceptance of each block's valid slots."""
    logits: dict[tuple[int, int], Tensor]
    """[K, V] of each block, by row and anchor."""


def oracle(
    target: Any, batch: Mapping[str, Tensor], anchors: Sequence[Sequence[int]], official: Mapping[str, float] = OFFICIAL
) -> Numbers:
    """Compute a micro-batch's loss by the formulas, block by block.

    ``anchors`` are those of each row. The draft is the target's ``mtp``; the target's states come from its plain forward.
    """
    draft: Any = extra_heads(target)
    ids, labels = batch["input_ids"], batch["labels"]
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    attended = batch.get("attention_mask", torch.ones_like(ids))
    given = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
    with torch.no_grad():
        seen = target.model(input_ids=ids, output_hidden_states=True, **given)
    embeddings, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    numerator, denominator, accepted, all_logits = head.new_zeros(()), 0.0, [], {}
    for row, row_anchors in enumerate(anchors):
        features = torch.cat([seen.hidden_states[at + 1][row] for at in draft.taps], -1)
        starts = [at for at in range(ids.shape[1]) if at == 0 or positions[row, at] != positions[row, at - 1] + 1]
        for anchor in row_anchors:
            start = max(at for at in starts if at <= anchor)
            end = min([at for at in starts if at > anchor] or [ids.shape[1]])
            prefix = [at for at in range(start, anchor) if attended[row, at]]
            tokens = [int(ids[row, anchor])] + [draft.mask_token_id] * (draft.block_size - 1)
            where = positions[row, anchor] + torch.arange(draft.block_size)
            states = block(draft, features[prefix], positions[row, prefix], embeddings[tokens], where)
            previous = [int(ids[row, min(anchor + at, ids.shape[1] - 1)]) for at in range(draft.block_size)]
            latents = latent(draft, previous, states)
            bias = [latents[at] @ draft.markov_head.markov_w2.weight.T if latents else 0 for at in range(len(states))]
            logits = torch.stack([states[at] @ head.T + bias[at] for at in range(len(states))])
            all_logits[row, anchor] = logits
            chances = []
            for slot in range(draft.block_size):
                at = anchor + 1 + slot
                if at >= end or labels[row, at] == -100:
                    break
                teacher = (seen.last_hidden_state[row, at - 1] @ head.T).softmax(-1)
                own = logits[slot].softmax(-1)
                distance = (own - teacher).abs().sum()
                chance = float((1 - distance.detach() / 2).clamp(0, 1))
                loss = official["ce"] * -own[ids[row, at]].log() + official["l1"] * distance
                if draft.confidence_head is not None:
                    looked_at = [states[slot]]
                    if draft.confidence_head.with_markov:
                        looked_at.append(draft.markov_head.markov_w1.weight[previous[slot]])
                    linear = draft.confidence_head.proj
                    sure = (torch.cat(looked_at) @ linear.weight[0] + linear.bias[0]).sigmoid()
                    loss = loss - official["confidence"] * (chance * sure.log() + (1 - chance) * (1 - sure).log())
                gamma = official["gamma"]
                weight = math.exp(-slot / gamma) if gamma else 1.0
                numerator, denominator = numerator + weight * loss, denominator + weight
                chances.append(chance)
            accepted.append(chances)
    return Numbers(numerator, denominator, accepted, all_logits)


def latent(draft: Any, previous: Sequence[int], states: Tensor) -> list[Tensor]:
    """Return the Markov head's latents of a block, one slot after the other; none without a head."""
    head: Any = draft.markov_head
    if head is None:
        return []
    found, memory = [], torch.zeros(head.markov_w1.weight.shape[1], dtype=states.dtype)
    for token, state in zip(previous, states, strict=True):
        embedded = head.markov_w1.weight[token]
        if hasattr(head, "gate_proj"):
            found.append(torch.sigmoid(head.gate_proj(torch.cat([state, embedded]))) * embedded)
        elif hasattr(head, "joint_proj"):
            gate, candidate, output = head.joint_proj(torch.cat([memory, embedded, state])).split(len(memory))
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            found.append(output.tanh())
        else:
            found.append(embedded)
    return found


def block(draft: Any, features: Tensor, before: Tensor, embedded: Tensor, where: Tensor) -> Tensor:
    """Return the states [K, H] of one block with inputs [K, H] at positions [K], after features [p, m*H] at [p]."""
    context, states = draft.hidden_norm(draft.fc(features)), embedded
    theta = draft.config.rope_parameters["rope_theta"]
    for layer in draft.layers:
        attention = layer.self_attn
        size, groups = attention.head_dim, attention.num_key_value_groups
        normed = layer.input_layernorm(states)
        query = attention.q_norm(attention.q_proj(normed).view(len(normed), -1, size))
        both = torch.cat([context, normed])
        key = attention.k_norm(attention.k_proj(both).view(len(both), -1, size))
        value = attention.v_proj(both).view(len(both), -1, size)
        query, key = rotated(query, where, theta), rotated(key, torch.cat([before, where]), theta)
        heads = [
            ((query[:, at] @ key[:, at // groups].T) / math.sqrt(size)).softmax(-1) @ value[:, at // groups]
            for at in range(query.shape[1])
        ]
        states = states + attention.o_proj(torch.cat(heads, -1))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return draft.norm(states)  # type: ignore[no-any-return]


def rotated(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return heads [T, N, D] turned by their positions [T]: pairs (i, i + D / 2) by position * theta^(-2 i / D)."""
    half = heads.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None].to(heads.dtype), angles.sin()[:, None].to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def drawn(batch: Mapping[str, Tensor], most: int = 4, seed: int = 0, step: int = 0) -> list[list[int]]:
    """Return the anchors of each row, as the engine draws them."""
    anchors, keep = draw(Sequences.of(batch), most, seed, step)
    return [row[kept].tolist() for row, kept in zip(anchors, keep, strict=True)]


def expected(
    target: Any, window: Sequence[Mapping[str, Tensor]], most: int = 4, **official: float
) -> dict[str, Tensor]:
    """Return the gradients of the draft's loss over a window of micro-batches, by name, and the loss under ``loss``."""
    copied: Any = copy.deepcopy(target)
    copied.zero_grad()
    found = [oracle(copied, batch, drawn(batch, most), OFFICIAL | official) for batch in window]
    loss = torch.stack([one.numerator for one in found]).sum() / sum(one.denominator for one in found)
    loss.backward()
    gradients = {name: one.grad for name, one in copied.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **gradients}
