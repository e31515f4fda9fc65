"""Counting a micro-batch: against a count by hand of the documents that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counts import causal_pairs
from torch import Tensor

from torchturbo.observe.flops import FULL, Span
from torchturbo.observe.tokens import tally
from torchturbo.train.batches import Collator, pack

SPANS = (FULL, Span("sliding", 3), Span("chunked", 4))


def expected(lengths: list[int]) -> list[int]:
    """Return what documents of these lengths add up to."""
    pairs = [sum(causal_pairs(length, span) for length in lengths) for span in SPANS]
    return [sum(lengths), sum(length * length for length in lengths), *pairs]


def found(**batch: Any) -> list[int]:
    counts = tally(batch, SPANS)
    assert counts is not None
    return counts.tolist()


def ids(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) + 5


def test_rows_without_anything_else_are_documents() -> None:
    """All of them real."""
    assert expected([7, 7]) == found(input_ids=ids(2, 7))


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_no_token(left: bool) -> None:
    """On either side."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]])

    assert expected([5, 7, 1]) == found(input_ids=ids(3, 7), attention_mask=mask.flip(1) if left else mask)


def test_positions_that_start_anew_begin_a_document() -> None:
    """As packing writes them."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])

    assert expected([3, 5]) == found(input_ids=ids(1, 8), position_ids=positions)


def test_positions_need_not_start_at_zero() -> None:
    """A document that was cut goes on where it was."""
    assert expected([4, 2]) == found(input_ids=ids(1, 6), position_ids=torch.tensor([[8, 9, 10, 11, 0, 1]]))


def test_a_mask_that_numbers_documents() -> None:
    """As LLaMA-Factory packs."""
    mask = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0]])

    assert expected([3, 2, 1]) == found(input_ids=ids(1, 8), attention_mask=mask)


def test_our_own_packed_rows_and_their_padding() -> None:
    """Padding of a packed row is a document of its own, without a target; it counts as none."""
    lengths = [9, 5, 4, 3, 8]
    examples = [{"input_ids": (row := list(range(5, 5 + length))), "labels": row} for length in lengths]
    batch = Collator(0)(pack(examples, 12))

    assert batch["input_ids"].shape[0] > 1 and (batch["input_ids"] == 0).any()
    assert expected(lengths) == found(**batch)


def test_a_last_document_without_a_target_is_no_padding_if_its_tokens_differ() -> None:
    """Only a run of one token is."""
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        "labels": torch.tensor([[5, 6, 7, -100, -100]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
    }
    assert expected([3, 2]) == found(**batch)


def test_embeddings_instead_of_tokens() -> None:
    """Only the shape is needed."""
    assert expected([4, 4]) == found(inputs_embeds=torch.zeros(2, 4, 8))


def test_masks_and_positions_of_another_shape_are_left_alone() -> None:
    """A mask per head, and positions per axis as vision-language models have them."""
    batch = {"attention_mask": torch.ones(2, 1, 4, 4), "position_ids": torch.zeros(3, 2, 4)}

    assert expected([4, 4]) == found(input_ids=ids(2, 4), **batch)


def test_a_batch_without_tokens() -> None:
    """Counts as nothing."""
    assert tally({"pixel_values": torch.ones(2, 3)}) is None
