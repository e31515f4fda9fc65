"""Multi-token prediction: what each depth predicts and is given, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchturbo.objectives.documents import numbers_of
from torchturbo.objectives.mtp import labels

IGNORED = -100


def row(*values: int) -> Tensor:
    return torch.tensor([values])


def targets(batch: dict[str, Any], depth: int) -> list[int]:
    found: list[int] = labels.targets(batch, depth, numbers_of(batch))[0].tolist()
    return found


def test_each_depth_predicts_one_token_further() -> None:
    """Depth k at position i predicts token i + k + 1, and its row ends with k + 1 positions without a target."""
    ids = torch.arange(10)[None]
    batch = {"input_ids": ids, "labels": ids}

    assert targets(batch, 1) == [2, 3, 4, 5, 6, 7, 8, 9, IGNORED, IGNORED]
    assert targets(batch, 2) == [3, 4, 5, 6, 7, 8, 9, IGNORED, IGNORED, IGNORED]
    assert labels.tokens(batch, 1, numbers_of(batch)).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]
    assert labels.tokens(batch, 2, numbers_of(batch)).tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 0, 0]]


def test_only_the_targets_own_mask_counts() -> None:
    """A prompt is no target; where it is what the target is predicted from, it does not matter."""
    batch = {"input_ids": row(1, 2, 3, 4, 5), "labels": row(IGNORED, IGNORED, IGNORED, 4, 5)}

    assert targets(batch, 1) == [IGNORED, 4, 5, IGNORED, IGNORED]
    assert targets(batch, 2) == [4, 5, IGNORED, IGNORED, IGNORED]


def test_shifted_labels_go_on_from_the_first_shift() -> None:
    """What a collator shifted already is shifted k places more; the last target may lie beyond the row."""
    batch = {"input_ids": row(1, 2, 3, 4), "shift_labels": row(2, 3, 4, 5)}

    assert targets(batch, 1) == [3, 4, 5, IGNORED]
    assert targets(batch, 3) == [5, IGNORED, IGNORED, IGNORED]
    assert targets(batch, 4) == [IGNORED] * 4


NUMBERS = torch.tensor([1, 1, 1, 2, 2, 2, 2])
SEEN = (NUMBERS[:, None] == NUMBERS).tril()
PACKED: dict[str, dict[str, Tensor]] = {
    "position_ids": {"position_ids": row(0, 1, 2, 0, 1, 2, 3)},
    "position_ids of four axes": {"position_ids": row(0, 1, 2, 0, 1, 2, 3).expand(4, 1, 7)},
    "seq_idx": {"seq_idx": row(0, 0, 0, 1, 1, 1, 1)},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32)},
    "numbered attention_mask": {"attention_mask": row(1, 1, 1, 2, 2, 2, 2)},
    "bool mask": {"attention_mask": SEEN[None, None]},
    "added mask": {"attention_mask": SEEN.float().sub(1).mul(1e9)[None, None]},
}


@pytest.mark.parametrize("told_by", PACKED)
def test_packed_documents_are_never_crossed(told_by: str) -> None:
    """By whatever the documents of a row are kept apart: neither a target nor an input is another document's."""
    ids = row(11, 12, 13, 21, 22, 23, 24)
    batch = {"input_ids": ids, "labels": ids, **PACKED[told_by]}
    inside = numbers_of(batch)

    assert targets(batch, 1) == [13, IGNORED, IGNORED, 23, 24, IGNORED, IGNORED]
    assert targets(batch, 2) == [IGNORED, IGNORED, IGNORED, 24, IGNORED, IGNORED, IGNORED]
    assert labels.tokens(batch, 1, inside).tolist() == [[12, 13, 0, 22, 23, 24, 0]]
    assert labels.tokens(batch, 2, inside).tolist() == [[13, 0, 0, 23, 24, 0, 0]]


def test_shifted_labels_do_not_reach_into_the_next_document() -> None:
    """Not even where the collator let the last token of a document predict the first of the next."""
    batch = {
        "input_ids": row(11, 12, 13, 21, 22, 23),
        "shift_labels": row(12, 13, 21, 22, 23, 24),
        "position_ids": row(0, 1, 2, 0, 1, 2),
    }

    assert targets(batch, 1) == [13, IGNORED, IGNORED, 23, 24, IGNORED]
    assert targets(batch, 2) == [IGNORED, IGNORED, IGNORED, 24, IGNORED, IGNORED]


def test_time_that_stands_still_inside_an_image_is_no_new_document() -> None:
    """Positions of three axes: the first is time, the same for all of an image's tokens."""
    positions = row(0, 1, 2, 2, 2, 3, 0, 1).expand(3, 1, 8)
    batch = {"input_ids": torch.arange(8)[None], "position_ids": positions}

    assert numbers_of(batch).tolist() == [[1, 1, 1, 1, 1, 1, 2, 2]]


def test_padding_on_either_side_does_no_harm() -> None:
    """Padding has no targets, and a mask of zeros and ones parts it from the text alone."""
    ids = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 0, 0]])
    mask = ids.ne(0).long()
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED), "attention_mask": mask}

    found = labels.targets(batch, 1, numbers_of(batch))

    assert found.tolist() == [[IGNORED, IGNORED, 7, IGNORED, IGNORED], [7, IGNORED, IGNORED, IGNORED, IGNORED]]


def test_each_row_of_a_batch_has_its_own_documents() -> None:
    """One position row for all rows works, too, as does one a row."""
    ids = torch.arange(12).view(2, 6)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]])
    both = {"input_ids": ids, "position_ids": positions}
    shared = {"input_ids": ids, "position_ids": positions[:1]}

    assert numbers_of(both).tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 2, 2]]
    assert numbers_of(shared).tolist() == [[1, 1, 1, 1, 2, 2]] * 2


def test_embeddings_are_shifted_like_tokens() -> None:
    """A model that is given embeddings [B, S, H] instead of tokens gets those of the tokens further on."""
    embedded = torch.arange(8.0).view(1, 4, 2)
    batch = {"inputs_embeds": embedded}

    found = labels.shifted(embedded, 1, numbers_of(batch))

    assert found.tolist() == [[[2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [0.0, 0.0]]]


def test_a_batch_without_tokens_is_an_error() -> None:
    """It says what was expected."""
    with pytest.raises(ValueError, match=r"expected input_ids \[B, S\] or inputs_embeds \[B, S, H\]"):
        numbers_of({})
