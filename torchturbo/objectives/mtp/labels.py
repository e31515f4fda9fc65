"""Labels and inputs of each depth: shifts along a row that never leave it, nor the document that a token is in.

Depth k at position i is given the token ``i + k`` and predicts the token ``i + k + 1``. What lies beyond the row or in
another document is no target, and no input: there stands a filler. Only the target's own label decides whether it
counts, as in Megatron-LM, whose loss mask is rolled with the labels
(``megatron/core/transformer/multi_token_prediction.py``).

All of it is done to whole rows, before the ranks of a sequence-parallel group take their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.normalise import IGNORE_INDEX


def documents(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of the document that each token of a micro-batch is in, int64 [B, S].

    Told by whatever keeps the documents of a packed row apart: ``position_ids`` that do not count on by one, as
    Transformers reads them, ``seq_idx``, ``cu_seq_lens_q``, or an ``attention_mask`` that numbers them [B, S] or in
    which a token does not attend to the one before it [B, H, S, S].
    """
    shape, device = _shape(batch)
    begins = torch.zeros(shape, dtype=torch.bool, device=device)
    for name, read in (("position_ids", _by_positions), ("seq_idx", _by_number), ("attention_mask", _by_mask)):
        if isinstance(value := batch.get(name), Tensor):
            begins[:, 1:] |= read(value)
    if isinstance(borders := batch.get("cu_seq_lens_q"), Tensor):
        begins.view(-1)[borders[(borders > 0) & (borders < begins.numel())].long()] = True
    return begins.cumsum(1)


def _shape(batch: Mapping[str, Any]) -> tuple[tuple[int, int], torch.device]:
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels"):
        if isinstance(value := batch.get(name), Tensor):
            return (value.shape[0], value.shape[1]), value.device
    raise ValueError("multi-token prediction: expected input_ids [B, S] or inputs_embeds [B, S, H]")


def _by_positions(positions: Tensor) -> Tensor:
    """Return whether each token but the first begins a document, by its position [B, S], or [axes, B, S] of M-RoPE."""
    if positions.dim() == 3:
        # Four axes: the first counts the text's tokens. Three: time, which stands still inside an image.
        return positions[0].diff() != 1 if len(positions) == 4 else positions[0].diff() < 0
    return positions.diff() != 1


def _by_number(numbers: Tensor) -> Tensor:
    return numbers.diff() != 0


def _by_mask(mask: Tensor) -> Tensor:
    if mask.dim() == 2:
        return _by_number(mask.long())
    before = mask[:, 0].diagonal(-1, 1, 2)  # what each token sees of the one before it
    return ~before if mask.dtype == torch.bool else before < 0


def shifted(values: Tensor, by: int, inside: Tensor, filler: float = 0) -> Tensor:
    """Return what stands ``by`` places further along a row [B, S, ...]; the filler where that is in another document.

    ``inside`` [B, S] numbers the documents.
    """
    if by == 0:
        return values
    if by >= values.shape[1]:
        return torch.full_like(values, filler)
    end = (0, 0) * (values.dim() - 2) + (0, by)
    ahead = functional.pad(values[:, by:], end, value=filler)
    same = functional.pad(inside[:, by:] == inside[:, :-by], (0, by), value=False)
    return ahead.masked_fill(~same.view(*same.shape, *(1,) * (values.dim() - 2)), filler)


def targets(batch: Mapping[str, Any], depth: int, inside: Tensor) -> Tensor:
    """Return the tokens that depth ``depth`` (1, 2, ...) predicts at each position, [B, S]; -100 where none.

    ``shift_labels`` hold the target of position i at i already: the last of a row may be a token beyond it.
    """
    ready = batch.get("shift_labels")
    if ready is None:
        return shifted(batch["labels"], depth + 1, inside, IGNORE_INDEX)
    ahead = shifted(ready, depth, inside, IGNORE_INDEX)
    if depth < ready.shape[1]:  # a target that the next document begins with
        last = functional.pad(inside[:, 1:] != inside[:, :-1], (0, 1), value=False)
        ahead = ahead.masked_fill(shifted(last, depth, inside, 0), IGNORE_INDEX)
    return ahead


def tokens(batch: Mapping[str, Any], depth: int, inside: Tensor) -> Tensor:
    """Return the tokens that depth ``depth`` is given at each position, [B, S]; 0 where there is none."""
    return shifted(batch["input_ids"], depth, inside)
