"""Packing examples into full sequences, and collating sequences into micro-batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.train.examples import Example


def pack(examples: Sequence[Example], length: int, grain: int = 1) -> list[Example]:
    """Put examples into as few sequences of at most ``length`` tokens as best-fit-decreasing finds.

    ``position_ids`` restart at each document: Transformers builds the block-diagonal attention mask from them.
    An example takes the room of whole multiples of ``grain``, the block of a diffusion model, to which it is filled up
    later. The result depends on the examples alone, so every rank and every resumed run packs alike.
    """
    order = sorted(range(len(examples)), key=lambda index: (-len(examples[index]["input_ids"]), index))
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin), sorted: the fullest that still fits is found by bisection
    for index in order:
        size = -(-len(examples[index]["input_ids"]) // grain) * grain
        at = bisect_left(open_bins, (size, -1))
        if at < len(open_bins):
            room, chosen = open_bins.pop(at)
        else:
            room, chosen = length, len(bins)
            bins.append([])
        bins[chosen].append(index)
        if room > size:
            insort(open_bins, (room - size, chosen))
    return [_joined([examples[index] for index in sorted(members)]) for members in bins]


def _joined(examples: Sequence[Example]) -> Example:
    joined: Example = {"input_ids": [], "labels": [], "position_ids": []}
    for example in examples:
        joined["input_ids"] += example["input_ids"]
        joined["labels"] += example["labels"]
        joined["position_ids"] += range(len(example["input_ids"]))
    return joined


class Collator:
    """Pads a micro-batch to its longest sequence, on the right.

    Unpacked examples get an ``attention_mask``. Packed ones must not have one (Transformers then reads no document
    boundaries from the positions); their padding is a document of its own, without targets.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``labels`` and ``attention_mask`` or ``position_ids``, each [B, T]."""
        longest = max(len(example["input_ids"]) for example in examples)
        gaps = [longest - len(example["input_ids"]) for example in examples]
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        packed = "position_ids" in examples[0]
        columns["position_ids" if packed else "attention_mask"] = []
        for example, gap in zip(examples, gaps, strict=True):
            columns["input_ids"].append(example["input_ids"] + [self.pad_token_id] * gap)
            columns["labels"].append(example["labels"] + [IGNORE_INDEX] * gap)
            if packed:
                columns["position_ids"].append(example["position_ids"] + list(range(gap)))
            else:
                columns["attention_mask"].append([1] * len(example["input_ids"]) + [0] * gap)
        return {name: torch.tensor(values, dtype=torch.long) for name, values in columns.items()}


@torch.no_grad()
def packing_leak(model: nn.Module, vocab_size: int) -> float:
    """Return how far a document's logits move when another one is packed before it: 0 where attention is separate.

    Found by running the model, since what position ids do is each model's own affair: attention that ignores them,
    and recurrent layers, carry one document's state into the next.
    """
    device = next(model.parameters()).device
    first, second = (torch.arange(start, start + 6, device=device) % vocab_size for start in (1, 4))
    positions = torch.arange(6, device=device)
    was_training = model.training
    model.eval()
    alone = _logits(model, second, positions)
    packed = _logits(model, torch.cat([first, second]), torch.cat([positions, positions]))[-6:]
    model.train(was_training)
    return float((packed - alone).abs().max() / alone.abs().max().clamp(min=1e-6))


def _logits(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    output: Any = model(input_ids=ids[None], position_ids=positions[None])
    return output.logits[0].float()  # type: ignore[no-any-return]
