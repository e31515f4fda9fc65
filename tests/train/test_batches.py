"""Packing and collating: documents never see each other, and a token's loss does not depend on its neighbours."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from torchturbo.train.batches import Collator, pack, packing_leak
from torchturbo.train.examples import Example


def example(size: int, start: int = 3) -> Example:
    ids = [3 + (start + at) % 300 for at in range(size)]
    return {"input_ids": ids, "labels": [-100, *ids[1:]]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_packing_keeps_every_token_and_the_limit(sizes: list[int]) -> None:
    """Nothing is lost, doubled or cut; at most one sequence may be half empty beside another."""
    examples = [example(size, at * 17) for at, size in enumerate(sizes)]

    packed = pack(examples, 16)

    assert all(len(sequence["input_ids"]) <= 16 for sequence in packed)
    documents = [document for sequence in packed for document in split(sequence)]
    assert sorted(documents) == sorted(item["input_ids"] for item in examples)
    assert sum(2 * len(sequence["input_ids"]) <= 16 for sequence in packed) <= 1
    assert packed == pack(examples, 16)


def split(sequence: Example) -> list[list[int]]:
    documents: list[list[int]] = []
    for token, label, position in zip(sequence["input_ids"], sequence["labels"], sequence["position_ids"], strict=True):
        if position == 0:
            assert label == -100  # it would be predicted from another document
            documents.append([])
        documents[-1].append(token)
    return documents


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_packed_logits_equal_unpacked_ones(kind: str, attention: str) -> None:
    """Per token, also beside a shorter packed sequence, where padding is a document of its own."""
    model = tiny.model(kind, attn_implementation=attention, use_cache=False).eval()
    examples = [example(size, size * 31) for size in (9, 7, 1, 5, 3)]
    collate = Collator(0)
    alone = {tuple(item["input_ids"]): logits(model, collate([item]))[0] for item in examples}

    packed = pack(examples, 17)
    batch = collate(packed)
    together = logits(model, batch)

    assert len(packed) == 2
    assert "attention_mask" not in batch
    checked = 0
    for row, sequence in enumerate(packed):
        at = 0
        for document in split(sequence):
            expected = alone[tuple(document)]
            torch.testing.assert_close(together[row, at : at + len(document)], expected, rtol=2e-5, atol=2e-6)
            at += len(document)
            checked += 1
    assert checked == 5


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def test_packed_loss_equals_the_sum_of_its_documents() -> None:
    """Summed cross-entropy over the same targets."""
    model = tiny.model(use_cache=False).eval()
    examples = [example(size, size * 31) for size in (9, 7, 5)]

    def summed(items: list[Example]) -> float:
        batch = Collator(0)(items)
        shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return float(functional.cross_entropy(logits(model, batch).flatten(0, 1), shifted.flatten(), reduction="sum"))

    assert summed(pack(examples, 32)) == pytest.approx(sum(summed([item]) for item in examples), rel=1e-6)


class Recurrent(nn.Module):
    """A model whose state runs on whatever the positions say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> object:
        return type("Output", (), {"logits": self.rnn(self.embed(input_ids))[0]})


def test_a_leak_between_documents_is_measured() -> None:
    """Attention by positions has none, recurrence has one."""
    assert packing_leak(tiny.model(use_cache=False), 320) < 1e-5
    assert packing_leak(tiny.model(use_cache=True), 320) > 1e-2  # transformers looks at positions only without a cache
    assert packing_leak(Recurrent(), 320) > 1e-2


def test_padding_is_masked_everywhere() -> None:
    """To the longest sequence, and no further."""
    batch = Collator(7)([example(2), example(4)])

    assert batch["input_ids"][0].tolist()[2:] == [7, 7]
    assert batch["labels"][0].tolist()[2:] == [-100, -100]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_an_example_takes_the_room_of_whole_blocks() -> None:
    """Three of 5 tokens fit into 16, and in blocks of 8 two do: a diffusion model fills each of them up."""
    examples = [{"input_ids": [at] * 5, "labels": [at] * 5} for at in range(3)]
    assert [15] == [len(row["input_ids"]) for row in pack(examples, 16)]
    assert [10, 5] == [len(row["input_ids"]) for row in pack(examples, 16, 8)]
