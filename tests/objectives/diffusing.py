"""Diffusion models of test size, their micro-batches, and block diffusion by its plainest formula."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import Tensor

from torchturbo.models import register
from torchturbo.objectives.diffusion.noise import Noise

MASK, FILL = 1, 2
BLOCK = 4


LLADA2: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip


def model(kind: str = "qwen3", **changes: Any) -> Any:
    """Return a tiny diffusion model."""
    if kind == "llada2_moe":
        register()
        changes = LLADA2 | changes
    return tiny.model(kind, **({"is_diffusion_model": True, "mask_token_id": MASK} | changes))


def noise(low: float = 0.3, high: float = 0.8, block_size: int = BLOCK, **changes: Any) -> Noise:
    """Return noise with the tokens of these models."""
    return Noise(low, high, block_size, MASK, FILL, **changes)


def rows(count: int = 2, length: int = 12, prompt: int = 3, seed: int = 5) -> dict[str, Tensor]:
    """Return a micro-batch of equal lengths whose first tokens have no label."""
    ids = torch.randint(3, 320, (count, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels}


def ragged(lengths: list[int], prompt: int = 3, seed: int = 5) -> dict[str, Tensor]:
    """Return a micro-batch of several lengths, padded on the right."""
    batch = rows(len(lengths), max(lengths), prompt, seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": batch["input_ids"].masked_fill(~mask, FILL),
        "labels": batch["labels"].masked_fill(~mask, -100),
        "attention_mask": mask.long(),
    }


def packed(lengths: list[int], prompt: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """Return one row of several documents, told apart by positions that start anew."""
    batch = rows(1, sum(lengths), 0, seed)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch["labels"][positions < prompt] = -100
    return {**batch, "position_ids": positions}
