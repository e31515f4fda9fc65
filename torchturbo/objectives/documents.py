"""Documents: which document of its row each token of a micro-batch is in, and which tokens are padding.

One reading for every objective and for the meter, of whatever a batch tells it by. A document begins where any of these
says so, and a token is padding where any of them does:

* ``position_ids`` [B, S] that do not count on by one, as Transformers reads them, or [axes, B, S] of M-RoPE. Tokens
  beyond the last position are padding: LLaMA-Factory pads tokens alone.
* ``seq_idx`` [B, S], where the number changes.
* ``cu_seq_lens_q``, the borders in the rows laid end to end. What lies beyond the last one is padding.
* ``attention_mask``. [B, S]: where the number changes; 0 is padding. Pairs, [B or 1, H or 1, S, S] of booleans or of
  what is added to scores, or of flex attention: where a token does not see the one before it; padding does not see
  itself. Of several masks, one for each kind of layer, one that lets a pair through is enough.
* Fillers: documents at a row's end that are one token over and over and have no label. So packed rows are padded, by
  :class:`torchturbo.train.batches.Collator` with one more document, by LLaMA-Factory with one a token.

Everything is tensor arithmetic on the batch's own device that waits for nothing; of a mask of pairs two diagonals are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.normalise import IGNORE_INDEX

CLOSED = -1e3
"""What is added to a score to close a pair is below this: the exponential of it is 0 in every number format.

Nearer to 0 lie biases, such as ALiBi's, which for a token itself and the one before it are never below -1.
"""


class Layout(NamedTuple):
    """Where documents and padding of a micro-batch are, each [B, S], bool."""

    begins: Tensor
    """Whether a token is the first of a document, or of padding."""
    real: Tensor
    """Whether a token is no padding."""


class _Told(NamedTuple):
    """What one of a batch's tensors tells."""

    begins: Tensor
    """Whether each token but the first begins a document, [B or 1, S - 1]."""
    real: Tensor | None = None
    """Which tokens are no padding, [B or 1, S]; None where it does not tell."""


def layout_of(batch: Mapping[str, Any]) -> Layout:
    """Return where a micro-batch's documents begin and which of its tokens are no padding.

    Raises
    ------
    ValueError
        It has neither tokens nor labels, or positions or a mask that do not fit them.

    """
    rows, length, device = _size(batch)
    begins = torch.zeros(rows, length, dtype=torch.bool, device=device)
    real = torch.ones_like(begins)
    for name, read in (
        ("position_ids", _by_positions),
        ("seq_idx", _by_numbers),
        ("cu_seq_lens_q", _by_borders),
        ("attention_mask", _by_mask),
    ):
        value = batch.get(name)
        told = (
            read(value, begins)
            if isinstance(value, Tensor) or (name == "attention_mask" and value is not None)
            else None
        )
        if told is not None:
            begins[:, 1:] |= told.begins
        if told is not None and told.real is not None:
            real &= told.real
    begins[:, :1] = True
    real &= ~_fillers(batch, begins)
    begins[:, 1:] |= real[:, 1:] != real[:, :-1]
    return Layout(begins, real)


def numbers_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of each token's document, counted from 1 in each row; 0 is padding. int64 [B, S]."""
    begins, real = layout_of(batch)
    return (begins & real).cumsum(1) * real


def supervised_tokens(batch: Mapping[str, Any]) -> Tensor | None:
    """Return whether each token of a micro-batch is a label, bool [B, S]; None for a batch without labels."""
    if isinstance(labels := batch.get("labels"), Tensor):
        return labels.ne(IGNORE_INDEX)
    if isinstance(shifted := batch.get("shift_labels"), Tensor):  # token i is the label of slot i - 1
        return functional.pad(shifted, (1, 0), value=IGNORE_INDEX)[:, :-1].ne(IGNORE_INDEX)
    return None


def _size(batch: Mapping[str, Any]) -> tuple[int, int, torch.device]:
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels"):
        if isinstance(value := batch.get(name), Tensor):
            return value.shape[0], value.shape[1], value.device
    raise ValueError("documents of a micro-batch: expected input_ids [B, S] or inputs_embeds [B, S, H]")


def _by_positions(positions: Tensor, tokens: Tensor) -> _Told:
    length = tokens.shape[1]
    line = positions[0] if positions.dim() == 3 else positions.reshape(-1, positions.shape[-1])
    # Of four axes the first counts the text's tokens. Of three it is time, which stands still inside an image.
    begins = line.diff() < 0 if positions.dim() == 3 and len(positions) == 3 else line.diff() != 1
    given = line.shape[-1]
    _fit("position_ids", positions, (len(line), max(given, length)), tokens)
    if given == length:
        return _Told(begins)
    begins = functional.pad(functional.pad(begins, (0, 1), value=True), (0, length - given - 1), value=False)
    return _Told(begins, torch.arange(length, device=line.device)[None] < given)


def _by_numbers(numbers: Tensor, tokens: Tensor) -> _Told:
    _fit("seq_idx", numbers, numbers.shape, tokens)
    return _Told(numbers[:, 1:] != numbers[:, :-1])


def _by_borders(borders: Tensor, tokens: Tensor) -> _Told:
    places = torch.arange(tokens.numel(), device=tokens.device)
    passed = torch.searchsorted(borders.to(places), places, right=True).view_as(tokens)
    return _Told(passed.diff() != 0, passed < len(borders))


def _by_mask(mask: Any, tokens: Tensor) -> _Told | None:
    if isinstance(mask, Mapping):
        kinds = [None if one is None else _by_mask(one, tokens) for one in mask.values()]
        told = [one for one in kinds if one is not None]
        if not told or len(told) < len(kinds):  # layers without a mask see everything
            return None
        begins, real = told[0]
        for one in told[1:]:
            begins = begins & one.begins
            real = None if real is None or one.real is None else real | one.real
        return _Told(begins, real)
    rows, length = tokens.shape
    if isinstance(mask, Tensor) and mask.dim() == 2:
        _fit("an attention_mask", mask, mask.shape, tokens)
        return _Told(mask[:, 1:] != mask[:, :-1], mask.ne(0))
    if isinstance(mask, Tensor) and mask.dim() == 4:
        _fit("an attention_mask", mask, (mask.shape[0], mask.shape[-1]), tokens)
        itself, before = (_open(mask.diagonal(at, -2, -1)).any(1) for at in (0, -1))
        return _Told(~before, itself)
    if (pairs := getattr(mask, "mask_mod", None)) is not None:
        row = torch.arange(rows, device=tokens.device)[:, None].expand(rows, length)
        at = torch.arange(length, device=tokens.device).expand(rows, length)
        sees = torch.vmap(torch.vmap(lambda b, query, key: pairs(b, query.new_zeros(()), query, key)))
        return _Told(~sees(row, at, (at - 1).clamp(min=0))[:, 1:], sees(row, at, at))
    raise ValueError(
        "documents of a micro-batch: expected an attention_mask [B, S], [B, H, S, S] or of flex attention, got"
        f" {type(mask).__name__}{list(mask.shape) if isinstance(mask, Tensor) else ''}"
    )


def _fit(name: str, value: Tensor, found: tuple[int, ...], tokens: Tensor) -> None:
    """Raise a ValueError for what tells of other rows or another length than a batch's tokens have."""
    rows, length = tokens.shape
    if len(found) != 2 or found[0] not in (1, rows) or found[1] != length:
        raise ValueError(
            f"documents of a micro-batch: expected {name} of {rows} x {length} tokens, got {list(value.shape)}"
        )


def _open(pairs: Tensor) -> Tensor:
    """Return which pairs of a mask attend to each other, bool."""
    return pairs if pairs.dtype == torch.bool else pairs > CLOSED


def _fillers(batch: Mapping[str, Any], begins: Tensor) -> Tensor:
    """Return which tokens [B, S] are in documents at a row's end that are one token over and over, without a label."""
    ids, labelled = batch.get("input_ids"), supervised_tokens(batch)
    if not isinstance(ids, Tensor) or labelled is None or labelled.shape != ids.shape:
        return torch.zeros_like(begins)
    alike = (ids == ids[:, -1:]) & ~labelled
    tail = alike.flip(1).long().cumprod(1).flip(1).bool()
    return (begins & tail).cumsum(1) > 0
