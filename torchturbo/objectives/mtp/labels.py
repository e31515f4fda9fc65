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


def shifted(values: Tensor, by: int, inside: Tensor, filler: float = 0) -> Tensor:
    """Return what stands ``by`` places further along a row [B, S, ...]; the filler where that is in another document.

    ``inside`` [B, S] numbers the documents (:func:`torchturbo.objectives.documents.numbers_of`).
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
