"""Anchors: the tokens after which a draft practises, and the block of inputs, labels and positions behind each.

After DeepSpec (https://github.com/deepseek-ai/DeepSpec, ``deepspec/modeling/dspark/common.py``). An anchor p is a token
that is supervised and whose successor is. Its block has K inputs, the token at p and K - 1 masks, and K labels, the
tokens at p + 1 ... p + K: the anchor's own slot predicts too.

Here the draw is a function of the row itself, a seed and the step, and of no random state: the same row gets the same
anchors when its weight is counted and when it is computed, on any rank and any mesh, and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.documents import numbers_of, supervised_tokens

BITS = 0xFFFFFFFF
"""Hashes are 32-bit numbers in int64 tensors, so that no product in them overflows."""


@dataclass(frozen=True)
class Sequences:
    """What of a micro-batch the draft needs, each [B, S]."""

    tokens: Tensor
    supervised: Tensor
    """Whether a token is one that the model is to predict, bool."""
    documents: Tensor
    """Number of the document that a token is in, from 1; 0 for padding."""
    positions: Tensor
    """As the model rotates by them; they begin anew with each packed document."""

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Sequences:
        """Return the sequences of a micro-batch as a model is called with it.

        Raises
        ------
        ValueError
            It has no ``input_ids`` [B, S], or neither ``labels`` nor ``shift_labels``.

        """
        tokens = batch.get("input_ids")
        if not isinstance(tokens, Tensor):
            raise ValueError("DSpark: expected input_ids [B, S]; a draft's blocks are made of tokens")
        return cls(tokens, _supervised(batch), numbers_of(batch), _positions(batch, tokens))

    def to(self, device: torch.device) -> Sequences:
        """Return them on a device."""
        return Sequences(*(getattr(self, field.name).to(device) for field in fields(self)))


def _supervised(batch: Mapping[str, Any]) -> Tensor:
    found = supervised_tokens(batch)
    if found is None:
        raise ValueError("DSpark: expected labels or shift_labels [B, S]")
    return found


def _positions(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return the positions of tokens [B, S]: of M-RoPE's axes that of time, which counts a text's tokens."""
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    elif positions.dim() == 3:  # with a fourth axis in front, by which nothing is rotated
        positions = positions[-3]
    lacking = tokens.shape[1] - positions.shape[-1]  # a collator may pad tokens alone
    return functional.pad(positions, (0, lacking)).expand_as(tokens)


def candidates(sequences: Sequences) -> Tensor:
    """Return which tokens may be anchors [B, S], bool: supervised, and so is the next one of the same document."""
    mask, document = sequences.supervised, sequences.documents
    follows = functional.pad(mask[:, 1:] & document[:, 1:].eq(document[:, :-1]), (0, 1), value=False)
    return mask & follows & document.ne(0)


def draw(sequences: Sequences, most: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Draw at most ``most`` anchors from each row, uniformly and without replacement.

    Returns
    -------
    tuple of Tensor
        The anchors [B, most], int64 and ascending, and which of these there are, bool; the others are 0 and stand last.

    """
    possible = candidates(sequences)
    keys = _keys(sequences, seed, step).masked_fill(~possible, BITS + 1)
    if (lacking := most - keys.shape[1]) > 0:
        keys = functional.pad(keys, (0, lacking), value=BITS + 1)
    chosen = keys.argsort(dim=1, stable=True)[:, :most]
    kept = torch.arange(most, device=keys.device) < possible.sum(1, keepdim=True)
    anchors = chosen.masked_fill(~kept, keys.shape[1]).sort(dim=1).values
    return anchors.masked_fill(~kept, 0), kept


def _keys(sequences: Sequences, seed: int, step: int) -> Tensor:
    """Return a random number for each token [B, S], made of its place, its row's supervised tokens, seed and step."""
    places = torch.arange(sequences.tokens.shape[1], device=sequences.tokens.device)
    # Counted within the supervised tokens: how far a row is padded, and on which side, is its micro-batch's doing.
    order = sequences.supervised.long().cumsum(1)
    content = _mixed(_mixed(sequences.tokens) + order).masked_fill(~sequences.supervised, 0).sum(1, keepdim=True)
    salt = _mixed(_mixed(torch.as_tensor(seed & BITS, device=places.device)) + step)
    return _mixed(_mixed(_mixed(content) ^ salt) + order)


def _mixed(numbers: Tensor) -> Tensor:
    """Return well spread 32-bit hashes of whole numbers.

    The finaliser by Thomas Mueller, https://stackoverflow.com/a/12996028.
    """
    numbers = numbers & BITS
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & BITS
    return numbers ^ (numbers >> 16)


@dataclass(frozen=True)
class Blocks:
    """The blocks behind the anchors of a micro-batch: A anchors a row, K slots a block."""

    anchors: Tensor
    """[B, A]: index of each anchor in its row."""
    keep: Tensor
    """[B, A], bool: whether there is such an anchor; others only fill up."""
    ids: Tensor
    """[B, A, K]: input tokens, the anchor and masks."""
    positions: Tensor
    """[B, A, K]: the anchor's position and those after it."""
    labels: Tensor
    """[B, A, K]: the token that each slot is to predict."""
    previous: Tensor
    """[B, A, K]: the token before that label, from the data."""
    teacher: Tensor
    """[B, A, K]: index in the row of the state from which the target predicts that label."""
    valid: Tensor
    """[B, A, K], bool: whether a slot counts: its label and all before it in the block are supervised."""

    def of_rank(self, rank: int, size: int) -> Blocks:
        """Return the blocks that one of ``size`` ranks computes: every ``size``-th, so that all have real ones."""
        lacking = -self.anchors.shape[1] % size

        def share(tensor: Tensor) -> Tensor:
            widths = (0, 0) * (tensor.dim() - 2) + (0, lacking)
            return functional.pad(tensor, widths)[:, rank::size]

        return Blocks(*(share(getattr(self, field.name)) for field in fields(self)))

    def weights(self, gamma: float) -> Tensor:
        """Return what each slot counts in the loss [B, A, K], float32: exp(-j / gamma) where it is valid.

        A gamma of 0 lets all count the same.
        """
        slots = torch.arange(self.valid.shape[2], device=self.valid.device, dtype=torch.float32)
        decay = torch.exp(-slots / gamma) if gamma > 0 else torch.ones_like(slots)
        return self.valid * decay


def make_blocks(sequences: Sequences, anchors: Tensor, keep: Tensor, size: int, mask_token_id: int) -> Blocks:
    """Return the blocks of ``size`` slots behind anchors [B, A]."""
    tokens, last = sequences.tokens, sequences.tokens.shape[1] - 1
    slots = torch.arange(size, device=tokens.device)
    at = anchors[..., None] + 1 + slots
    inside, at = at <= last, at.clamp(max=last)

    def taken(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(1, index.flatten(1)).view_as(index)

    first = taken(tokens, anchors)[..., None]
    labels = taken(tokens, at)
    same = taken(sequences.documents, at).eq(taken(sequences.documents, anchors)[..., None])
    counts = inside & taken(sequences.supervised, at) & same & keep[..., None]
    masks = first.new_full((), mask_token_id).expand(*anchors.shape, size - 1)
    return Blocks(
        anchors,
        keep,
        torch.cat([first, masks], 2),
        taken(sequences.positions, anchors)[..., None] + slots,
        labels,
        torch.cat([first, labels[..., :-1]], 2),
        at - 1,
        counts.long().cumprod(2).bool(),
    )


def draw_blocks(sequences: Sequences, most: int, seed: int, step: int, *, size: int, mask_token_id: int) -> Blocks:
    """Draw anchors and return their blocks; A is the most anchors that a row has, and at least 1."""
    anchors, keep = draw(sequences, min(most, max(1, sequences.tokens.shape[1] - 1)), seed, step)
    count = max(1, int(keep.sum(1).max()))
    return make_blocks(sequences, anchors[:, :count], keep[:, :count], size, mask_token_id)
