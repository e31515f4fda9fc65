"""Floating-point operations of a training step: what the model needs, and what the hardware does with recomputation.

Conventions (docs/guides/observing.md says them to users):

* Matrix products alone are counted, two operations a multiply-add, as in PaLM (https://arxiv.org/abs/2204.02311,
  appendix B) and ``torch.utils.flop_counter``; an embedding is a look-up.
* Forward is counted once, the gradients of inputs and of weights once each: three times forward for a model that is
  trained as a whole. A gradient that no backward pass computes is not counted: a frozen weight has none (LoRA's base
  weights), nor has the input of a layer below which nothing is trained.
* Of a mixture of experts the active experts count.
* Full mask: every token of a document attends to every other, L^2 pairs, whatever the mask leaves out. The causal figure
  counts the pairs that the mask lets through: L (L + 1) / 2, fewer with a sliding or chunked window.
* What an objective computes beside the model's forward counts with the rows that it has: the depths of multi-token
  prediction every token, a draft its slots. Block diffusion counts the doubled sequence, and the head once a target.
* Hardware flops add what activation checkpointing, and a loss that recomputes the head, compute a second time.

:mod:`torchturbo.observe.matmuls` finds the parts in a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

OPERATIONS = 2
"""A multiply and an add."""


class Span(NamedTuple):
    """Which keys a query sees at most, besides being causal."""

    kind: str = "full"
    """``full``, ``sliding`` (the last ``size`` keys, itself included) or ``chunked`` (those of its own chunk)."""
    size: int = 0


FULL = Span()
SLOTS = Span("slots")
"""Pairs of a draft's slots and of what they could see: the row's tokens, and all of its slots."""
TOKENS, TARGETS, ROWS = "tokens", "targets", "slots"
"""What a part is counted by: tokens that go through the layers, tokens that go through the head, slots of a draft."""


class Beside(NamedTuple):
    """Amounts of a step beside its tokens and their pairs."""

    targets: float | None = None
    """Tokens that go through the head; None for all of them."""
    slots: float = 0
    """Slots of a draft's blocks."""
    slot_squared: float = 0
    """Pairs of slots and of what lies in their row."""
    slot_pairs: float = 0
    """Those that the mask lets through."""


ALONE = Beside()


class Part(NamedTuple):
    """Multiply-adds of one part of a model, per token (or what else it is counted by) and per (query, key) pair."""

    name: str
    forward: float = 0
    """Per token: the weights that a token meets."""
    inputs: float = 0
    """Per token: gradients of inputs."""
    weights: float = 0
    """Per token: gradients of trained weights."""
    recomputed: float = 0
    """Per token: what is computed a second time in backward."""
    pair: float = 0
    """Per pair: scores, and the weighted sum of values."""
    pair_backward: float = 0
    pair_recomputed: float = 0
    span: Span = FULL
    per: str = TOKENS
    """:data:`TOKENS`, :data:`TARGETS` or :data:`ROWS`."""


@dataclass(frozen=True)
class Flops:
    """A model's flops as a function of tokens and of (query, key) pairs; further heads are further parts."""

    parts: tuple[Part, ...]
    left_out: str = ""
    """What of the model is not counted, for a message; empty where all is."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of tokens for which the causal figure needs a number of pairs."""
        return tuple(sorted({part.span for part in self.parts if part.pair and part.span != SLOTS}))

    def model(self, tokens: float, squared_lengths: float, beside: Beside = ALONE) -> float:
        """Return the flops that training needs, full mask: documents of L tokens have L^2 pairs, summed over them."""
        return self._training(tokens, self._full(squared_lengths, beside), beside)

    def causal(self, tokens: float, pairs: Mapping[Span, float], beside: Beside = ALONE) -> float:
        """Return the flops that training needs for the pairs that the mask lets through, by span."""
        return self._training(tokens, {**pairs, SLOTS: beside.slot_pairs}, beside)

    def hardware(self, tokens: float, squared_lengths: float, beside: Beside = ALONE) -> float:
        """Return the flops with what is recomputed, full mask."""
        pairs = self._full(squared_lengths, beside)
        again = sum(
            part.recomputed * _times(part, tokens, beside)
            + part.pair_recomputed * (pairs[part.span] if part.pair else 0)
            for part in self.parts
        )
        return self.model(tokens, squared_lengths, beside) + OPERATIONS * again

    def _full(self, squared_lengths: float, beside: Beside) -> dict[Span, float]:
        return dict.fromkeys(self.spans, squared_lengths) | {SLOTS: beside.slot_squared}

    def _training(self, tokens: float, pairs: Mapping[Span, float], beside: Beside) -> float:
        return OPERATIONS * sum(
            (part.forward + part.inputs + part.weights) * _times(part, tokens, beside)
            + (part.pair + part.pair_backward) * (pairs[part.span] if part.pair else 0)
            for part in self.parts
        )


def _times(part: Part, tokens: float, beside: Beside) -> float:
    targets = tokens if beside.targets is None else beside.targets
    return {TOKENS: tokens, TARGETS: targets, ROWS: beside.slots}[part.per]
