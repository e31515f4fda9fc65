"""The objective: a loss for each depth of serial heads, by teacher forcing, all with the model's embeddings and head.

    total = main + weight * sum over depths of the mean cross-entropy over the depth's own targets

Each depth's denominator is its own number of targets in the whole accumulation window on all ranks. Megatron-LM divides
the sum by the number of depths (``megatron/core/transformer/multi_token_prediction.py``): with D depths its
``mtp_loss_scaling_factor`` is D times the weight here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from torchturbo.objectives.chunked import ChunkedHead, head_of
from torchturbo.objectives.documents import numbers_of
from torchturbo.objectives.mtp import labels
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.objectives.normalise import IGNORE_INDEX, Term
from torchturbo.objectives.taps import Taps
from torchturbo.parallel.sequence_inputs import part
from torchturbo.parallel.ulysses import SHARED, MicroBatch


def metric(depth: int) -> str:
    """Return the name under which the loss of a depth (1, 2, ...) is logged."""
    return f"mtp_{depth}_loss"


class _Forward(NamedTuple):
    """Where the depths of one forward have got to."""

    done: int
    state: Tensor
    inside: Tensor
    """Numbers of the documents, [B, S] of the whole micro-batch."""


class MultiTokenPrediction:
    """The losses of a model's serial heads.

    Make it after the normaliser is installed and before sequence parallelism is.

    Parameters
    ----------
    model
        The module that is called.
    base
        The Transformers model, with its heads attached.
    heads
        These heads.

    """

    def __init__(self, model: nn.Module, base: nn.Module, heads: SerialHeads) -> None:
        self.base, self.heads = base, heads
        self.taps = Taps(model, base)
        self._calls = {name: self.taps.watch(module) for name, module in heads.watched(base).items()}
        self._at: _Forward | None = None

    def terms(self, coefficient: float) -> list[Term]:
        """Return the term of each depth, in order: each goes on from where the one before it ended."""
        return [
            Term(metric(depth), partial(self._value, depth), partial(self._weight, depth), coefficient)
            for depth in range(1, self.heads.depths + 1)
        ]

    def _weight(self, depth: int, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many targets a micro-batch has at a depth."""
        if batch.get("labels") is None and batch.get("shift_labels") is None:
            return None
        return labels.targets(batch, depth, numbers_of(batch)).ne(IGNORE_INDEX).sum()

    def _value(self, depth: int, outputs: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Run a depth and return the sum of its cross-entropies over this rank's tokens, a scalar."""
        given = self.taps.batch
        if given is None:
            return None
        if depth == 1:
            self._at = _Forward(0, self.heads.first(self._calls), numbers_of(given))
        assert self._at is not None and self._at.done == depth - 1
        inside, shared = self._at.inside, batch.get(SHARED)
        embedded = self._embedded(given, depth, inside, shared)
        state, hidden = self.heads.depth(depth - 1, self._at.state, embedded, self._calls)
        self._at = _Forward(depth, state, inside) if depth < self.heads.depths else None
        wanted = _part(labels.targets(given, depth, inside), shared, IGNORE_INDEX)
        return self._summed(hidden.flatten(0, 1), wanted.flatten().to(hidden.device))

    def _embedded(self, given: Mapping[str, Any], depth: int, inside: Tensor, shared: MicroBatch | None) -> Tensor:
        """Return the embeddings [B, S, H] of this rank's tokens, each ``depth`` places further."""
        if given.get("input_ids") is None:
            return _part(labels.shifted(given["inputs_embeds"], depth, inside), shared)
        embeddings: Any = self.base.get_input_embeddings()  # type: ignore[operator]
        embedded: Tensor = embeddings(_part(labels.tokens(given, depth, inside), shared))
        return embedded

    def _summed(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of hidden states [N, H] against tokens [N], in chunks where wanted."""
        head = head_of(self.base)
        if isinstance(head, ChunkedHead):
            return head.loss(hidden, wanted, (), IGNORE_INDEX)
        logits = head(hidden)
        wide = logits if logits.dtype.itemsize > 4 else logits.float()
        return functional.cross_entropy(wide, wanted, reduction="sum", ignore_index=IGNORE_INDEX)


def _part(tensor: Tensor, shared: MicroBatch | None, filler: int = 0) -> Tensor:
    """Return this rank's part of a micro-batch's tensor [B, S, ...]; all of it where ranks share none."""
    return tensor if shared is None else part(tensor, shared, filler)
