"""Anchors and their blocks, against the rules applied token by token."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from torchturbo.objectives.dspark.anchors import Blocks, Sequences, draw, draw_blocks, make_blocks


def sequences(mask: str, **more: Any) -> Sequences:
    """Return one row, supervised where a text has a 1."""
    supervised = torch.tensor([[int(one) for one in mask.split()]])
    ids = torch.arange(10, 10 + supervised.shape[1])[None]
    return Sequences.of({"input_ids": ids, "labels": ids.masked_fill(supervised.eq(0), -100), **more})


def test_the_example() -> None:
    """By hand, and as DeepSpec's sampler and evaluation mask have it."""
    row = sequences("0 0 1 1 1 0 1 1 0")

    anchors, keep = draw(row, 6, seed=0, step=0)

    assert anchors.tolist() == [[2, 3, 6, 0, 0, 0]]
    assert keep.tolist() == [[True] * 3 + [False] * 3]
    blocks = make_blocks(row, anchors, keep, 3, 99)
    assert blocks.valid[0, :3].int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert not blocks.valid[0, 3:].any()
    assert blocks.ids[0, :3].tolist() == [[12, 99, 99], [13, 99, 99], [16, 99, 99]]
    assert blocks.labels[0, 0].tolist() == [13, 14, 15]
    assert blocks.previous[0, 0].tolist() == [12, 13, 14]
    assert blocks.teacher[0, 0].tolist() == [2, 3, 4]
    assert blocks.positions[0, 0].tolist() == [2, 3, 4]


def test_what_fills_up_never_counts() -> None:
    """Not even where token 0, which it is made of, could be an anchor itself."""
    row = sequences("1 1 0 1 1")
    anchors, keep = draw(row, 4, 0, 0)

    assert keep.sum() == 2
    assert make_blocks(row, anchors, keep, 2, 99).valid.int().tolist() == [[[1, 0], [1, 0], [0, 0], [0, 0]]]


def by_rule(batch: dict[str, Tensor], size: int) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """Return the candidates of each row, and which slots of their blocks count, token by token."""
    ids, labels = batch["input_ids"], batch["labels"]
    rows, length = ids.shape
    positions = batch.get("position_ids", torch.arange(length).expand_as(ids))
    attended = batch.get("attention_mask", torch.ones_like(ids))
    candidates, counting = [], {}
    for row in range(rows):
        starts = [at for at in range(length) if at == 0 or positions[row, at] != positions[row, at - 1] + 1]
        document = [sum(start <= at for start in starts) for at in range(length)]
        good = [bool(attended[row, at]) and labels[row, at] != -100 for at in range(length)]
        found = []
        for at in range(length - 1):
            if good[at] and good[at + 1] and document[at] == document[at + 1]:
                found.append(at)
                slots, alive = [], True
                for label in range(at + 1, at + 1 + size):
                    alive = alive and label < length and good[label] and document[label] == document[at]
                    slots.append(int(alive))
                counting[row, at] = slots
        candidates.append(found)
    return candidates, counting


def batch(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 90, (3, 20), generator=generator)
    labels = ids.masked_fill(torch.rand(3, 20, generator=generator) < 0.25, -100)
    made = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        made["position_ids"] = torch.tensor([[*range(7), *range(13)], [*range(20)], [*range(1), *range(10), *range(9)]])
    if kind == "padded":
        made["attention_mask"] = (torch.arange(20) < torch.tensor([[20], [11], [17]])).long()
    if kind == "left":
        made["attention_mask"] = (torch.arange(20) >= torch.tensor([[0], [11], [4]])).long()
    return made


@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "left"])
def test_every_candidate_and_slot_is_the_rules(kind: str) -> None:
    given = batch(kind)
    candidates, counting = by_rule(given, 4)
    row = Sequences.of(given)
    anchors, keep = draw(row, 20, 0, 0)

    assert candidates == [one[kept].tolist() for one, kept in zip(anchors, keep, strict=True)]
    valid = make_blocks(row, anchors, keep, 4, 99).valid
    for (at, anchor), slots in counting.items():
        assert slots == valid[at, anchors[at].tolist().index(anchor) if anchor else 0].int().tolist()


@pytest.mark.parametrize("form", ["numbers", "square", "added"])
def test_documents_are_found_in_masks(form: str) -> None:
    """Document numbers in a 2-D mask, and masks [B, 1, S, S]: the last token of a document has no label to follow it."""
    numbers = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    mask: Tensor = numbers
    if form != "numbers":
        mask = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    if form == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    anchors, keep = draw(sequences("1 1 1 1 1 1 1 1 1", attention_mask=mask), 9, 0, 0)

    assert anchors[keep].tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_shifted_labels_are_the_same() -> None:
    given = batch("packed")
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    shifted[:, -1] = -100
    other = {**given, "shift_labels": shifted}
    first = given.pop("labels")
    given["labels"] = first.clone()
    given["labels"][:, 0] = -100  # token 0 is nobody's label
    other.pop("labels")

    for one, two in zip(draw(Sequences.of(given), 5, 1, 2), draw(Sequences.of(other), 5, 1, 2), strict=True):
        assert torch.equal(one, two)


def test_a_draw_is_a_function_of_row_seed_and_step() -> None:
    """Not of the rows beside it, of padding, or of any random state: the same row gets the same anchors anywhere."""
    given = batch("plain")
    anchors, keep = draw(Sequences.of(given), 5, seed=3, step=4)
    for row in range(3):
        torch.manual_seed(row)
        wider = {name: torch.nn.functional.pad(one[row : row + 1], (0, 3), value=0) for name, one in given.items()}
        wider["labels"][:, -3:] = -100
        alone, kept = draw(Sequences.of(wider), 5, seed=3, step=4)
        assert torch.equal(anchors[row], alone[0])
        assert torch.equal(keep[row], kept[0])
        left = {name: one.roll(3, 1) for name, one in wider.items()}
        assert torch.equal(anchors[row] + 3, draw(Sequences.of(left), 5, seed=3, step=4)[0][0])
    others = [draw(Sequences.of(given), 5, seed, step)[0].tolist() for seed, step in ((3, 5), (4, 4), (2**40, 4))]
    assert anchors.tolist() not in others
    assert len({str(one) for one in others}) == 3


def test_a_draw_is_uniform_and_without_replacement() -> None:
    row = sequences("1 1 1 1 0 1 1 1 1 1 1")
    candidates = [0, 1, 2, 5, 6, 7, 8, 9]
    seen: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    times = 1500
    for step in range(times):
        found = draw(row, 3, seed=11, step=step)[0][0].tolist()
        assert sorted(set(found)) == found
        seen.update(found)
        pairs[found[0], found[1]] += 1
    assert sorted(seen) == candidates
    chance = 3 / len(candidates)
    spread = math.sqrt(times * chance * (1 - chance))
    assert all(abs(count - times * chance) < 4.5 * spread for count in seen.values()), seen
    assert len(pairs) == 21  # every first and second of three


def test_only_as_many_blocks_as_a_row_has() -> None:
    """Never none: every rank runs its draft."""
    assert draw_blocks(sequences("0 1 1 1 0"), 512, 0, 0, size=2, mask_token_id=99).anchors.tolist() == [[1, 2]]
    empty = draw_blocks(sequences("0 0 0"), 512, 0, 0, size=2, mask_token_id=99)
    assert (1, 1, 2) == empty.valid.shape
    assert not empty.valid.any()


def test_weights_fall_along_a_block() -> None:
    blocks = draw_blocks(sequences("1 1 1 1 0"), 1, 0, 0, size=3, mask_token_id=99)
    (count,) = blocks.valid.sum(-1).flatten().tolist()

    assert blocks.weights(4.0)[0, 0].tolist() == pytest.approx([math.exp(-at / 4) * (at < count) for at in range(3)])
    assert blocks.weights(0)[0, 0].tolist() == [float(at < count) for at in range(3)]


def test_ranks_share_blocks() -> None:
    """Each block is one rank's, and all ranks have equally many."""
    row = sequences("1 1 1 1 1 1")
    blocks = draw_blocks(row, 5, 0, 0, size=2, mask_token_id=99)
    shares = [blocks.of_rank(rank, 3) for rank in range(3)]

    assert [(1, 2)] * 3 == [share.anchors.shape for share in shares]
    kept = [(int(anchor), share.labels[0, at].tolist()) for share in shares for at, anchor in enumerate(share.anchors[0]) if share.keep[0, at]]  # fmt: skip
    assert sorted(kept) == [(at, blocks.labels[0, at].tolist()) for at in range(5)]
    assert isinstance(shares[0], Blocks)
    assert float(blocks.weights(4.0).sum()) == pytest.approx(sum(float(share.weights(4.0).sum()) for share in shares))


def test_tokens_and_labels_are_needed() -> None:
    with pytest.raises(ValueError, match="expected input_ids"):
        Sequences.of({"inputs_embeds": torch.zeros(1, 2, 3)})
    with pytest.raises(ValueError, match="expected labels or shift_labels"):
        Sequences.of({"input_ids": torch.zeros(1, 2, dtype=torch.long)})
