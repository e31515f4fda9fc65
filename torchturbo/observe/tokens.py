"""Counts what a micro-batch holds: tokens that are no padding, and the (query, key) pairs of its documents.

Everything is tensor arithmetic on the batch's own device, so that counting waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchturbo.objectives.diffusion.noise import DOUBLED, Doubled
from torchturbo.objectives.documents import layout_of
from torchturbo.objectives.dspark.anchors import Sequences, candidates
from torchturbo.observe.flops import Span


class _Layout(NamedTuple):
    """Where documents and padding of a micro-batch are, each [B, T]."""

    real: Tensor
    """Whether a token is no padding."""
    seen: Tensor
    """Keys that a full causal mask lets a token see: how many tokens of its document there are up to it; 0 for padding."""
    ends: Tensor
    """Whether a token is the last one of its document."""


def tally(batch: Mapping[str, Any], spans: Sequence[Span] = ()) -> Tensor | None:
    """Return the counts of a micro-batch, int64 [2 + len(spans)]; None for a batch without tokens.

    They are: tokens that are no padding; the sum over documents of their length squared; for each span the pairs that
    a causal mask of that span lets through. Documents and padding are found as the objectives find them.
    """
    layout = _layout(batch)
    if layout is None:
        return None
    tokens, full = layout.real.sum(), layout.seen.sum()
    # L (L + 1) / 2 pairs of a document are L^2 = 2 pairs - L in a full mask
    return torch.stack([tokens, 2 * full - tokens, *(_pairs(layout.seen, full, span) for span in spans)])


def doubled(batch: Mapping[str, Any], spans: Sequence[Span], block: int) -> Tensor | None:
    """Return the same counts for a batch of which block diffusion makes, or has made, a doubled one, and its targets.

    A document of L tokens is filled up to L' in whole blocks, and runs as 2 L' tokens, each of which could see all; the
    mask lets L' (L' + block) pairs through. Targets are L', its noisy half. The first count stays the tokens of the
    batch as it is.
    """
    made: Doubled | None = batch.get(DOUBLED)
    layout = _layout(batch if made is None else _half(batch, made.length))
    if layout is None:
        return None
    tokens = layout.real.sum() if made is None else layout.seen.new_tensor(made.tokens)
    lengths = (layout.seen * layout.ends + block - 1) // block * block
    pairs = (lengths * (lengths + block)).sum()
    return torch.stack([tokens, 4 * (lengths**2).sum(), *(pairs for _ in spans), lengths.sum()])


def _half(batch: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Return one half of a doubled batch, whose documents are whole blocks already."""
    return {name: batch[name][:, :length] for name in ("input_ids", "attention_mask", "position_ids")}


def drafted(batch: Mapping[str, Any], anchors: int, slots: int) -> Tensor | None:
    """Return the slots of a draft in a micro-batch, and pairs of them and what they could see, and do see: int64 [3].

    Blocks of ``slots`` slots begin behind at most ``anchors`` tokens of a row. Beside them lie the row's tokens and all
    of its slots; a slot sees the tokens before its anchor, of which the mean over all that can be one counts, and its own
    block.
    """
    layout = _layout(batch)
    if layout is None or "input_ids" not in batch:
        return None
    possible = candidates(Sequences.of(batch)) & layout.real
    found = possible.sum(1)
    kept = found.clamp(max=anchors)
    own = kept * slots
    before = ((layout.seen - 1) * possible).sum(1)
    sees = slots * kept * before // found.clamp(min=1)
    return torch.stack([own.sum(), (own * (layout.real.sum(1) + own)).sum(), (sees + own * slots).sum()])


def _layout(batch: Mapping[str, Any]) -> _Layout | None:
    ids = batch.get("input_ids")
    shape = ids if isinstance(ids, Tensor) else batch.get("inputs_embeds")
    if not isinstance(shape, Tensor) or shape.dim() < 2:
        return None
    try:
        starts, real = layout_of(batch)
    except ValueError:  # a mask or positions of a model's own form: its rows are taken for documents
        starts, real = layout_of({name: batch[name] for name in ("input_ids", "inputs_embeds") if name in batch})
    index = torch.arange(starts.shape[1], device=starts.device)
    start = torch.where(starts, index, 0).cummax(dim=1).values
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    return _Layout(real, (index - start + 1) * real, ends)


def _pairs(seen: Tensor, full: Tensor, span: Span) -> Tensor:
    if span.kind == "sliding":
        return seen.clamp(max=span.size).sum()
    if span.kind == "chunked":
        return ((seen - 1) % span.size + 1).mul(seen > 0).sum()
    return full
