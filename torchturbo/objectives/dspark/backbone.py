"""A draft's backbone: what DSpark's core gives it and wants back. One architecture of drafts is one subclass.

The core (:mod:`torchturbo.objectives.dspark.objective`) draws anchors, taps the target, embeds the blocks, and computes
the losses. A backbone turns embedded blocks and the target's states into hidden states, and has the two small heads.
Under sequence parallelism it gets the whole rows' features and some of their blocks on each rank, and needs not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchturbo.objectives.dspark.confidence import ConfidenceHead
from torchturbo.objectives.dspark.markov import MarkovHead
from torchturbo.objectives.dspark.visibility import Visibility
from torchturbo.objectives.heads import ExtraHeads


class DraftStates(NamedTuple):
    """What a backbone returns for every slot."""

    head: Tensor
    """[B, A, K, H]: what the target's head makes logits of; the Markov head looks at it too."""
    confidence: Tensor
    """[B, A, K, H]: what the confidence head looks at."""


class Draft(ExtraHeads):
    """A draft that predicts the K tokens after an anchor in one forward, given the target's states before it."""

    block_size: int
    """K, slots of a block."""
    mask_token_id: int
    """The token that stands in all slots but the anchor's."""
    taps: tuple[int, ...]
    """Decoder layers of the target whose outputs are the features, ascending; -1 is the embeddings' output."""

    @property
    def markov(self) -> MarkovHead | None:
        """Return the head that biases a slot's logits by the token before; None where the draft has none."""
        return None

    @property
    def confidence(self) -> ConfidenceHead | None:
        """Return the head that foretells whether a slot's token is accepted; None where the draft has none."""
        return None

    def unlike(self, base: Any) -> str:
        """Return whether the Markov head knows as many tokens as the model, whose embeddings may have been resized."""
        known = None if self.markov is None else self.markov.markov_w2.weight.shape[0]
        wanted = base.get_input_embeddings().weight.shape[0]
        return "" if known in (None, wanted) else f"know {known} tokens, and its embeddings have {wanted}"

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the features [B, S, m*H] of the m tapped layers' outputs, which are [B, S, ..., H] and detached.

        Called on each rank with its part of the sequences.
        """
        return torch.cat(list(states), -1)

    def forward(self, features: Tensor, embedded: Tensor, visibility: Visibility) -> DraftStates:
        """Return the hidden states of all slots.

        Parameters
        ----------
        features
            [B, S, m*H], detached, of whole rows.
        embedded
            [B, A, K, H], detached: the blocks' input tokens as the target embeds them.
        visibility
            What slots see, ``visibility.dense(window)``; and the positions: ``context_positions`` [B, S] of the
            context's keys and ``positions`` [B, A, K] of the slots.

        """
        raise TypeError(f"{type(self).__name__} has no forward of its own")


def of(heads: nn.Module | None) -> Draft | None:
    """Return extra heads that are a draft; None for others, and for none."""
    return heads if isinstance(heads, Draft) else None
