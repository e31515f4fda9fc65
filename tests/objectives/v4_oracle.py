"""DeepSeek-V4's heads by their formulas, token by token, from tensors under the names that checkpoints have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
EPS = 1e-6


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    return normed if weight is None else weight * normed


def turned(x: Tensor, position: int, sizes: Any, sign: int = 1) -> Tensor:
    """Turn the last pairs of numbers of [..., D], the i-th by ``position * theta^(-2i/d)``."""
    size = int(sizes.head_dim * sizes.partial_rotary_factor)
    plain, pairs = x[..., :-size], x[..., -size:]
    out = []
    for at in range(0, size, 2):
        angle = torch.tensor(sign * position * float(torch.tensor(sizes.rope_theta ** -(at / size))), dtype=x.dtype)
        a, b = pairs[..., at], pairs[..., at + 1]
        out += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.cat((plain, torch.stack(out, -1)), -1)


def around(x: Tensor, inside: Callable[[Tensor], Tensor], weights: Weights, half: str, sizes: Any) -> Tensor:
    """Lay streams [T, hc, H] around a sub-layer (manifold-constrained hyper-connections, arXiv:2512.24880)."""
    n = sizes.hc_mult
    fn, base, scale = (weights[f"hc_{half}_{name}"] for name in ("fn", "base", "scale"))
    raw = rms(x.flatten(1)) @ fn.T
    pre = torch.sigmoid(raw[:, :n] * scale[0] + base[:n]) + sizes.hc_eps
    post = 2 * torch.sigmoid(raw[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = torch.softmax((raw[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + sizes.hc_eps
    mix = mix / (mix.sum(1, keepdim=True) + sizes.hc_eps)
    for _ in range(sizes.hc_sinkhorn_iters - 1):
        mix = mix / (mix.sum(2, keepdim=True) + sizes.hc_eps)
        mix = mix / (mix.sum(1, keepdim=True) + sizes.hc_eps)
    out = inside(sum(pre[:, j, None] * x[:, j] for j in range(n)))  # type: ignore[arg-type]
    streams = [post[:, k, None] * out + sum(mix[:, j, k, None] * x[:, j] for j in range(n)) for k in range(n)]
    return torch.stack(streams, 1)


def latent(x: Tensor, position: int, weights: Weights, sizes: Any) -> Tensor:
    """Return the one vector [D] that is key and value of a token [H]."""
    return turned(rms(weights["attn.wkv.weight"] @ x, weights["attn.kv_norm.weight"]), position, sizes)


def attended(x: Tensor, position: int, keys: Sequence[Tensor], weights: Weights, sizes: Any) -> Tensor:
    """Return the attention of one token [H] to keys [D] each."""
    low = rms(weights["attn.wq_a.weight"] @ x, weights["attn.q_norm.weight"])
    heads = (weights["attn.wq_b.weight"] @ low).view(sizes.num_attention_heads, -1)
    outs = []
    for head, query in enumerate(heads):
        query = turned(rms(query), position, sizes)
        scores = [query @ key / sizes.head_dim**0.5 for key in keys] + [weights["attn.attn_sink"][head]]
        share = torch.softmax(torch.stack(scores), 0)
        out = sum(share[at] * key for at, key in enumerate(keys))
        outs.append(turned(out, position, sizes, -1))  # type: ignore[arg-type]
    groups = torch.cat(outs).view(sizes.o_groups, -1)
    first = weights["attn.wo_a.weight"].view(sizes.o_groups, sizes.o_lora_rank, -1)
    return weights["attn.wo_b.weight"] @ torch.cat([first[g] @ groups[g] for g in range(sizes.o_groups)])


def expert(x: Tensor, name: str, weights: Weights, sizes: Any) -> Tensor:
    gate = (weights[f"ffn.{name}.w1.weight"] @ x).clamp(max=sizes.swiglu_limit)
    up = (weights[f"ffn.{name}.w3.weight"] @ x).clamp(-sizes.swiglu_limit, sizes.swiglu_limit)
    return weights[f"ffn.{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)


def mixture(x: Tensor, weights: Weights, sizes: Any) -> Tensor:
    """Return what the experts make of one token [H]."""
    scores = torch.sqrt(torch.log1p(torch.exp(weights["ffn.gate.weight"] @ x)))
    chosen = (scores + weights["ffn.gate.bias"]).topk(sizes.num_experts_per_tok).indices.tolist()
    total = sum(scores[at] for at in chosen)
    routed = sum(scores[at] / total * expert(x, f"experts.{at}", weights, sizes) for at in chosen)
    return sizes.routed_scaling_factor * routed + expert(x, "shared_experts", weights, sizes)


def block(x: Tensor, positions: Sequence[int], keys_of: Any, weights: Weights, sizes: Any) -> Tensor:
    """Run a block on the streams [T, hc, H] of tokens; ``keys_of(t, own)`` lists what token t sees, of its own keys too."""

    def attention(y: Tensor) -> Tensor:
        y = rms(y, weights["attn_norm.weight"])
        own = [latent(y[t], positions[t], weights, sizes) for t in range(len(y))]
        return torch.stack([attended(y[t], positions[t], keys_of(t, own), weights, sizes) for t in range(len(y))])

    def experts(y: Tensor) -> Tensor:
        return torch.stack([mixture(token, weights, sizes) for token in rms(y, weights["ffn_norm.weight"])])

    return around(around(x, attention, weights, "attn", sizes), experts, weights, "ffn", sizes)


def joined(x: Tensor, weights: Weights, sizes: Any) -> Tensor:
    """Join the streams [T, hc, H] of tokens: [T, H]."""
    raw = rms(x.flatten(1)) @ weights["hc_head_fn"].T * weights["hc_head_scale"] + weights["hc_head_base"]
    share = torch.sigmoid(raw) + sizes.hc_eps
    return sum(share[:, j, None] * x[:, j] for j in range(sizes.hc_mult))  # type: ignore[return-value]


def of_block(weights: Weights, number: int) -> dict[str, Tensor]:
    """Return the tensors of one ``mtp.N`` by the names below it."""
    start = f"mtp.{number}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
