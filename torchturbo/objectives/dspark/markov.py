"""Markov head: adds to a slot's logits a low-rank bias that depends on the token before it.

A block's slots are computed at once and know nothing of each other's tokens. The bias is what is serial in a draft: it
is W2 times a latent [r], and the three kinds differ in how the latent comes about. Only :meth:`MarkovHead.latent`
differs, so that the product with W2 [V, r], which makes logits, can be computed for few rows at a time.
DeepSpec (https://github.com/deepseek-ai/DeepSpec), ``deepspec/modeling/dspark/markov_head.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Vanilla: the latent is the previous token's embedding W1[x].

    Parameters
    ----------
    vocabulary, rank, hidden
        V, r and H.

    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """Return W1 [..., r] of tokens [...]."""
        embedded: Tensor = self.markov_w1(previous)
        return embedded

    def latent(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Return latents [..., K, r] of the tokens before each slot [..., K] and the slots' states [..., K, H]."""
        return self.embed(previous)


class GatedMarkovHead(MarkovHead):
    """Gated: the embedding times a gate, the sigmoid of a linear map of state and embedding."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def latent(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Return latents [..., K, r] of the tokens before each slot [..., K] and the slots' states [..., K, H]."""
        embedded = self.embed(previous)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded.to(hidden.dtype)], -1))) * embedded


class RecurrentMarkovHead(MarkovHead):
    """Rnn: a state s [r] runs along the block, so that a slot knows all tokens before it there.

    One linear map of [s; W1[x]; h] gives gate g, candidate c and output o; the latent is tanh(o), and the next state
    sigmoid(g) s + (1 - sigmoid(g)) tanh(c). It begins with 0.
    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latent(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Return latents [..., K, r] of the tokens before each slot [..., K] and the slots' states [..., K, H]."""
        embedded = self.embed(previous).to(hidden.dtype)
        state, latents = torch.zeros_like(embedded[..., 0, :]), []
        for seen, own in zip(embedded.unbind(-2), hidden.unbind(-2), strict=True):
            gate, candidate, output = self.joint_proj(torch.cat([state, seen, own], -1)).chunk(3, -1)
            latents.append(torch.tanh(output))
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.stack(latents, -2)


KINDS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
"""By ``markov_head_type`` of a draft's configuration."""
