"""Confidence head: foretells for each slot how likely the target accepts its token, as a logit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConfidenceHead(nn.Module):
    """A linear map to one number, of a slot's state and, where wanted, the embedding of the token before it.

    DeepSpec's ``AcceptRatePredictor`` has a bias, DeepSeek-V4's has none.

    Parameters
    ----------
    hidden, rank
        H, and r of the Markov head whose embeddings are looked at too; 0 without.

    """

    def __init__(self, hidden: int, rank: int = 0, *, bias: bool = True) -> None:
        super().__init__()
        self.with_markov = bool(rank)
        self.proj = nn.Linear(hidden + rank, 1, bias=bias)

    def forward(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Return logits [...] of states [..., H] and, with a Markov head, its embeddings [..., r]; at least float32."""
        seen = (
            hidden if previous is None or not self.with_markov else torch.cat([hidden, previous.to(hidden.dtype)], -1)
        )
        dtype = torch.promote_types(seen.dtype, torch.float32)
        bias = None if self.proj.bias is None else self.proj.bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(seen.to(dtype), self.proj.weight.to(dtype), bias).squeeze(-1)
