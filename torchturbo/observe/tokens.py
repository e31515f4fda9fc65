"""Counts what a micro-batch holds: tokens that are no padding, and the (query, key) pairs of its documents.

Everything is tensor arithmetic on the batch's own device, so that counting waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.observe.flops import Span


def tally(batch: Mapping[str, Any], spans: Sequence[Span] = ()) -> Tensor | None:
    """Return the counts of a micro-batch, int64 [2 + len(spans)]; None for a batch without tokens.

    They are: tokens that are no padding; the sum over documents of their length squared; for each span the pairs that
    a causal mask of that span lets through. A row is one document unless its ``position_ids`` start anew or its
    ``attention_mask`` changes (which also holds where the mask numbers the documents of a packed row).
    """
    ids = batch.get("input_ids")
    shape = ids if isinstance(ids, Tensor) else batch.get("inputs_embeds")
    if not isinstance(shape, Tensor) or shape.dim() < 2:
        return None
    rows, length = shape.shape[:2]
    mask = _matrix(batch.get("attention_mask"), rows, length)
    positions = _matrix(batch.get("position_ids"), rows, length)
    index = torch.arange(length, device=shape.device)
    starts = torch.zeros((rows, length), dtype=torch.bool, device=shape.device)
    if mask is not None:
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    if positions is not None:
        starts[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    start = torch.where(starts, index, 0).cummax(dim=1).values
    real = mask > 0 if mask is not None else ~_padding(ids, batch.get("labels"), index >= start[:, -1:])
    seen = (index - start + 1) * real  # keys that a full causal mask lets a token see; 0 for padding
    tokens, full = real.sum(), seen.sum()
    # L (L + 1) / 2 pairs of a document are L^2 = 2 pairs - L in a full mask
    return torch.stack([tokens, 2 * full - tokens, *(_pairs(seen, full, span) for span in spans)])


def _pairs(seen: Tensor, full: Tensor, span: Span) -> Tensor:
    if span.kind == "sliding":
        return seen.clamp(max=span.size).sum()
    if span.kind == "chunked":
        return ((seen - 1) % span.size + 1).mul(seen > 0).sum()
    return full


def _matrix(value: Any, rows: int, length: int) -> Tensor | None:
    """Return a tensor [rows, length]; None for anything else, such as a mask per head or positions per axis."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != length or value.shape[0] not in (1, rows):
        return None
    return value.expand(rows, length)


def _padding(ids: Any, labels: Any, last: Tensor) -> Tensor:
    """Return where packed rows are padded [B, T]: with a last document of one token over and over, and no target."""
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or labels.shape != ids.shape:
        return torch.zeros_like(last)
    empty = ((ids == ids[:, -1:]) & (labels == IGNORE_INDEX)) | ~last
    return last & empty.all(dim=1, keepdim=True)
