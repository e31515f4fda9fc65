"""The part of a micro-batch's arguments that one rank of a sequence-parallel group computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.parallel.ulysses import SHARED, MicroBatch

SPLIT = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments with an entry a token of which a part is taken as it is."""
WHOLE = ("attention_mask", "position_ids", "labels", "shift_labels", "seq_idx")
"""Arguments with an entry a token that are used whole or get a treatment of their own."""
GENERATING = ("past_key_values", "use_cache", "logits_to_keep", "num_logits_to_keep")
"""Arguments that say that a forward without labels is a step of generation."""
REFUSED: Mapping[str, str] = {
    "past_key_values": "a cache holds whole sequences",
    "logits_to_keep": "the last tokens are on one rank only",
    "num_logits_to_keep": "the last tokens are on one rank only",
    "output_attentions": "no rank has the weights of all heads",
    "output_router_logits": "the router's loss is no sum over tokens",
}
"""Arguments that must not be set, and why."""


def tokens_of(given: Mapping[str, Any]) -> Tensor:
    """Return a micro-batch's ``input_ids`` [B, S] or ``inputs_embeds`` [B, S, H].

    Raises
    ------
    ValueError
        It has neither.

    """
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(tokens := given.get(name), Tensor):
            return tokens
    raise ValueError("sequence parallelism: expected input_ids [B, S] or inputs_embeds [B, S, H]")


def generates(given: Mapping[str, Any]) -> bool:
    """Return whether a forward is a step of generation, which every rank computes whole."""
    return given.get("labels") is None and not torch.is_grad_enabled() and any(_set(given, name) for name in GENERATING)


def refuse(given: Mapping[str, Any], rows: int, length: int) -> None:
    """Raise a ValueError for arguments of a micro-batch [B, S] that can't be split over ranks."""
    for name, reason in REFUSED.items():
        if _set(given, name):
            raise ValueError(f"sequence parallelism: {name} is set, but {reason}; leave it out or use sp_size 1")
    for name, value in given.items():
        known = name in SPLIT or name in WHOLE
        if isinstance(value, Tensor) and not known and value.shape[:2] == (rows, length):
            raise ValueError(
                f"sequence parallelism: {name} {list(value.shape)} has an entry a token, and whether a part of it"
                f" would do is not known; expected {', '.join((*SPLIT, *WHOLE))}"
            )


def _set(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    return value is not None and value is not False and not (isinstance(value, int) and value == 0)


def positions_of(given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return the positions [B or 1, S] of a micro-batch's tokens, counted from 0 where it has none."""
    positions = given.get("position_ids")
    if positions is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    if positions.dim() != 2:
        raise ValueError(f"sequence parallelism: expected position_ids [B, S], got {list(positions.shape)}")
    return positions  # type: ignore[no-any-return]


def counted_on(positions: Tensor, padded: int) -> Tensor:
    """Return positions [B, S] that count on from the last one up to a longer length [B, padded]."""
    more = torch.arange(1, padded - positions.shape[1] + 1, device=positions.device)
    return torch.cat((positions, positions[:, -1:] + more), 1)


def split(given: dict[str, Any], batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of this rank's part of a micro-batch.

    Labels are shifted before they are split: the last token of a part is to predict the first of the next.
    """
    mine = {name: value for name, value in given.items() if name not in WHOLE}
    for name in SPLIT:
        if given.get(name) is not None:
            mine[name] = part(given[name], batch)
    # A table of learned positions may end with the sequence: padding takes the last position, and not one beyond.
    at = torch.arange(batch.padded, device=batch.positions.device)[batch.part].clamp(max=batch.length - 1)
    mine["position_ids"] = batch.positions[:, at]
    mine |= _targets(given, batch)
    if batch.padded > batch.length:
        mine |= _padding_document(given, batch)
    return {**mine, SHARED: batch}


def part(tensor: Tensor, batch: MicroBatch, filler: int = 0) -> Tensor:
    """Return this rank's part of [B, S, ...], padded with a value: [B, S / n, ...]."""
    widths = (0, 0) * (tensor.dim() - 2) + (0, batch.padded - tensor.shape[1])
    return functional.pad(tensor, widths, value=filler)[:, batch.part].contiguous()


def _targets(given: Mapping[str, Any], batch: MicroBatch) -> dict[str, Any]:
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if shifted is None and labels is not None:
        shifted = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    if shifted is None:
        return {}
    mine = {"shift_labels": part(shifted, batch, IGNORE_INDEX)}
    if labels is None:
        return mine
    found = {"labels": part(labels, batch, IGNORE_INDEX), **mine}
    if given.get("num_items_in_batch") is None:  # a mean over this rank's own tokens would be no share of the whole
        found["num_items_in_batch"] = shifted.ne(IGNORE_INDEX).sum()
    return found


def _padding_document(given: Mapping[str, Any], batch: MicroBatch) -> dict[str, Any]:
    """Return the borders of packed documents, as kernels for packed rows take them, with one more for the padding."""
    borders = {name: given[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if given.get(name) is not None}
    return {name: torch.cat((at, at.new_tensor([batch.padded]))) for name, at in borders.items()}
