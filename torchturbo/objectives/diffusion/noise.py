"""Noise: a micro-batch becomes a doubled one, ``[noisy ; clean]``, in which masked tokens are what is learned.

For each sample sigma is drawn from U[low, high], and each of its tokens that has a label is hidden with probability
sigma, as inclusionAI's dFactory does (tasks/dataset/data_transform.py there). A sample is filled up to whole blocks with
tokens that are hidden and learned like its own; what a batch adds beyond that is never seen and never learned.

The draws follow from a seed, the optimizer step and the sample itself, and not from a generator's state: the same
sample has other noise in every step, a resumed run goes on with the noise that the whole run has, data loaders may
fetch ahead as they like, and the ranks of a sequence-parallel group, or another number of data-parallel ranks, draw the
same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from torchturbo.objectives.diffusion.models import rounded_up
from torchturbo.objectives.documents import numbers_of
from torchturbo.objectives.normalise import IGNORE_INDEX

DOUBLED = "block_diffusion"
"""Key of a doubled batch under which its :class:`Doubled` lies."""
EVALUATION = -1
"""The step of every evaluation: its noise is always the same."""
TELLING = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
"""What tells of a micro-batch's documents; a doubled one numbers them in its own way."""
KNOWN = ("input_ids", "labels", *TELLING, "shift_labels", "num_items_in_batch")
"""What a micro-batch may hold."""


@dataclass(frozen=True)
class Doubled:
    """What a doubled batch is made of."""

    length: int
    """L: tokens of either half, whole blocks."""
    block_size: int
    whole: bool
    """Whether every row is one document without padding, so that all have the same mask."""
    tokens: int = 0
    """Tokens of the batch that was doubled, without padding."""


@dataclass(frozen=True)
class Noise:
    """The noise of one run."""

    low: float
    high: float
    """Bounds of sigma, the probability with which a token is hidden."""
    block_size: int
    mask_token: int
    """The token that stands for a hidden one."""
    fill_token: int
    """The token that fills up a sample's last block, and a batch."""
    seed: int = 0
    divisor: int = 1
    """What a doubled sequence's length divides by: the ranks that share it."""

    def __call__(self, batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return a doubled micro-batch.

        Parameters
        ----------
        batch
            ``input_ids`` and ``labels`` [B, S], as a causal language model takes them (the label of a token is the
            token itself, or -100), and what tells documents and padding apart
            (:mod:`torchturbo.objectives.documents`). A document without a label is left out: nothing is learned from
            it.
        step
            Optimizer steps that are finished, or :data:`EVALUATION`.

        Returns
        -------
        dict
            With L >= S in whole blocks: ``input_ids``, ``position_ids`` and ``attention_mask`` [B, 2L], where documents
            are counted from 1 and 0 is padding; ``labels`` and ``shift_labels`` [B, L] of the noisy half, not shifted,
            -100 but for hidden tokens; ``block_diffusion``, the :class:`Doubled`.

        Raises
        ------
        ValueError
            The batch has no tokens or labels, or tensors that have no place in a doubled sequence.

        """
        _refuse_others(batch)
        ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
        numbers = numbers_of(batch).cpu()
        rows = [self._row(*row, step) for row in zip(ids, labels, numbers, strict=True)]
        grain = math.lcm(self.block_size, self.divisor)
        length = rounded_up(max(1, *(len(row[0]) for row in rows)), grain)
        fillers = (self.fill_token, self.fill_token, IGNORE_INDEX, 0, 0)
        noisy, clean, targets, positions, documents = (
            torch.stack([_filled(row[at], length, filler) for row in rows]) for at, filler in enumerate(fillers)
        )
        device = batch["input_ids"].device
        made: dict[str, Any] = {
            "input_ids": torch.cat((noisy, clean), 1),
            "attention_mask": torch.cat((documents, documents), 1),
            "position_ids": torch.cat((positions, positions), 1),
            "labels": targets,
            "shift_labels": targets.clone(),
        }
        made = {name: value.to(device) for name, value in made.items()}
        whole, tokens = bool(documents.eq(1).all()), int(numbers.ne(0).sum())
        return made | {DOUBLED: Doubled(length, self.block_size, whole, tokens)}

    def _row(self, ids: Tensor, labels: Tensor, numbers: Tensor, step: int) -> tuple[Tensor, ...]:
        """Return noisy and clean tokens, targets, positions and document numbers of one row [S], without padding."""
        spans = [(start, _without_padding(ids, labels, start, end, self.fill_token)) for start, end in _spans(numbers)]
        spans = [(start, end) for start, end in spans if labels[start:end].ne(IGNORE_INDEX).any()]
        if not spans:
            return (ids[:0],) * 5
        documents = [(ids[start:end], labels[start:end]) for start, end in spans]
        generator = torch.Generator().manual_seed(self._seed_of(documents, step))
        parts = [self._document(*document, generator) for document in documents]
        lengths = [len(part[0]) for part in parts]
        positions = torch.cat([torch.arange(length) for length in lengths])
        numbered = torch.cat([torch.full((length,), at + 1) for at, length in enumerate(lengths)])
        noisy, clean, targets = (torch.cat([part[at] for part in parts]) for at in range(3))
        return noisy, clean, targets, positions, numbered

    def _document(self, ids: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return a document's noisy and clean tokens and its targets, in whole blocks."""
        fill = -len(ids) % self.block_size
        clean = torch.cat((ids, ids.new_full((fill,), self.fill_token)))
        maskable = torch.cat((labels.ne(IGNORE_INDEX), torch.ones(fill, dtype=torch.bool)))
        sigma = self.low + (self.high - self.low) * float(torch.rand((), generator=generator, dtype=torch.float64))
        hidden = (torch.rand(len(clean), generator=generator, dtype=torch.float64) < sigma) & maskable
        return clean.masked_fill(hidden, self.mask_token), clean, clean.masked_fill(~hidden, IGNORE_INDEX)

    def _seed_of(self, documents: Sequence[tuple[Tensor, Tensor]], step: int) -> int:
        """Return the seed of a row's draws: of the run, the step and the row's own tokens, whatever pads them."""
        content = b"".join(value.to(torch.int64).numpy().tobytes() for document in documents for value in document)
        digest = blake2b(f"{self.seed} {step} ".encode() + content, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _spans(numbers: Tensor) -> list[tuple[int, int]]:
    """Return the start and the end of each document in a row of numbers [S]."""
    found = []
    changes = (numbers[1:] != numbers[:-1]).nonzero().flatten().add(1).tolist()
    for start, end in zip([0, *changes], [*changes, len(numbers)], strict=True):
        if numbers[start] != 0:
            found.append((start, end))
    return found


def _without_padding(ids: Tensor, labels: Tensor, start: int, end: int, filler: int) -> int:
    """Return the end of a document without fillers that have no label: padding that no mask told of."""
    kept = (ids[start:end].ne(filler) | labels[start:end].ne(IGNORE_INDEX)).nonzero()
    return start + int(kept[-1]) + 1 if len(kept) else start


def _filled(row: Tensor, length: int, filler: int) -> Tensor:
    return torch.cat((row, row.new_full((length - len(row),), filler)))


def _refuse_others(batch: Mapping[str, Any]) -> None:
    for name in ("input_ids", "labels"):
        if not isinstance(batch.get(name), Tensor) or batch[name].dim() != 2:
            raise ValueError(f"block diffusion: expected {name} [B, S] in every micro-batch")
    others = [name for name, value in batch.items() if isinstance(value, Tensor) and name not in KNOWN]
    if others:
        raise ValueError(
            f"block diffusion: {', '.join(others)}: no known place in a doubled sequence; expected {', '.join(KNOWN)}"
        )
