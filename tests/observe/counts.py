"""What flops and pairs are by their definitions, and what torch counts in a step of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchturbo.observe.flops import OPERATIONS, Flops, Span

B, T = 2, 24
MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip


def counted(run: Callable[[], Any]) -> int:
    """Return what torch counts; its math attention runs over the whole mask."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 300, (B, T))
    return {"input_ids": ids, "labels": ids}


def step(model: Any) -> None:
    model(**batch()).loss.backward()


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=0.01)


def forward(flops: Flops, tokens: float, squared_lengths: float) -> float:
    """Return the flops of a forward pass: of all tokens, and of all pairs of tokens of a document."""
    return OPERATIONS * sum(part.forward * tokens + part.pair * squared_lengths for part in flops.parts)


def causal_pairs(length: int, span: Span) -> int:
    """Return how many (query, key) pairs a document of ``length`` tokens has under a causal mask."""
    if span.kind == "sliding":
        inside = min(length, span.size)
        return inside * (inside + 1) // 2 + (length - inside) * span.size
    if span.kind == "chunked":
        chunks, rest = divmod(length, span.size)
        return chunks * span.size * (span.size + 1) // 2 + rest * (rest + 1) // 2
    return length * (length + 1) // 2
