"""LLaDA2-MoE written out, token by token, head by head and expert by expert: slow, and plain to read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """Computes logits from a checkpoint's tensors under their published names.

    Angles are float32, as they are in every implementation; all else has the tensors' format.
    """

    def __init__(self, tensors: dict[str, Tensor], config: Any) -> None:
        self.tensors, self.config = tensors, config

    def logits(self, ids: list[int], allowed: list[list[bool]]) -> Tensor:
        """Return [S, V] for one row of tokens; ``allowed[i][j]`` says whether token i sees token j."""
        states = [self.tensors["model.word_embeddings.weight"][token] for token in ids]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            normal = [self.norm(state, f"{name}.input_layernorm") for state in states]
            attended = self.attention(normal, f"{name}.attention", allowed)
            states = [state + change for state, change in zip(states, attended, strict=True)]
            normal = [self.norm(state, f"{name}.post_attention_layernorm") for state in states]
            dense = layer < self.config.first_k_dense_replace
            changes = [self.gated(one, f"{name}.mlp") if dense else self.mixture(one, f"{name}.mlp") for one in normal]
            states = [state + change for state, change in zip(states, changes, strict=True)]
        head = "model.word_embeddings" if self.config.tie_word_embeddings else "lm_head"
        return torch.stack([self.linear(self.norm(state, "model.norm"), head) for state in states])

    def linear(self, state: Tensor, name: str) -> Tensor:
        made = self.tensors[f"{name}.weight"] @ state
        return made + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else made

    def norm(self, state: Tensor, name: str) -> Tensor:
        return state / torch.sqrt((state * state).mean() + self.config.rms_norm_eps) * self.tensors[f"{name}.weight"]

    def gated(self, state: Tensor, name: str) -> Tensor:
        gate = self.linear(state, f"{name}.gate_proj")
        return self.linear(gate / (1 + torch.exp(-gate)) * self.linear(state, f"{name}.up_proj"), f"{name}.down_proj")

    def rotated(self, head: Tensor, position: int) -> Tensor:
        """Turn pairs (d, d + r / 2) of the first r dimensions; the others stay."""
        rotary = int(self.config.head_dim * self.config.partial_rotary_factor)
        result = list(head)
        for pair in range(rotary // 2):
            frequency = 1 / torch.tensor(float(self.config.rope_theta)) ** (torch.tensor(2.0 * pair) / rotary)
            angle = torch.tensor(float(position)) * frequency
            cosine, sine = angle.cos().to(head.dtype), angle.sin().to(head.dtype)
            first, second = head[pair], head[pair + rotary // 2]
            result[pair] = first * cosine - second * sine
            result[pair + rotary // 2] = second * cosine + first * sine
        return torch.stack(result)

    def attention(self, states: list[Tensor], name: str, allowed: list[list[bool]]) -> list[Tensor]:
        heads, groups, size = (
            getattr(self.config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        rows = [self.linear(state, f"{name}.query_key_value").split(size) for state in states]

        def turned(part: Tensor, norm: str, position: int) -> Tensor:
            return self.rotated(self.norm(part, f"{name}.{norm}"), position)

        keys = [
            [turned(row[heads + group], "key_layernorm", at) for group in range(groups)] for at, row in enumerate(rows)
        ]
        outputs = []
        for at, row in enumerate(rows):
            parts = []
            for head in range(heads):
                group = head // (heads // groups)
                query = turned(row[head], "query_layernorm", at)
                seen = [other for other in range(len(rows)) if allowed[at][other]]
                scores = torch.stack([query @ keys[other][group] / math.sqrt(size) for other in seen])
                weights = scores.exp() / scores.exp().sum()
                values = [rows[other][heads + groups + group] for other in seen]
                parts.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
            outputs.append(self.linear(torch.cat(parts), f"{name}.dense"))
        return outputs

    def mixture(self, state: Tensor, name: str) -> Tensor:
        output = torch.zeros_like(state)
        for expert, weight in self.routed(state, name).items():
            output = output + weight * self.gated(state, f"{name}.experts.{expert}")
        if self.config.num_shared_experts:
            output = output + self.gated(state, f"{name}.shared_experts")
        return output

    def routed(self, state: Tensor, name: str) -> dict[int, Tensor]:
        """Return the weight of each expert that a token is sent to."""
        config, scores = self.config, 1 / (1 + torch.exp(-self.linear(state, f"{name}.gate")))
        biased = [
            float((score + bias).detach())
            for score, bias in zip(scores, self.tensors[f"{name}.gate.expert_bias"], strict=True)
        ]
        each = config.num_experts // config.n_group
        groups = [range(group * each, (group + 1) * each) for group in range(config.n_group)]
        worth = [sum(sorted((biased[expert] for expert in group), reverse=True)[:2]) for group in groups]
        best = sorted(range(config.n_group), key=lambda group: -worth[group])[: config.topk_group]
        open_experts = [expert for group in best for expert in groups[group]]
        chosen = sorted(open_experts, key=lambda expert: -biased[expert])[: config.num_experts_per_tok]
        total = sum(scores[expert] for expert in chosen) if config.norm_topk_prob and len(chosen) > 1 else 1.0
        return {expert: scores[expert] / total * config.routed_scaling_factor for expert in chosen}
