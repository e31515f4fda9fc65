"""What blocks see: the rule, one pair at a time, and the masks of two attentions that carry it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.dspark.anchors import Sequences, draw_blocks
from torchturbo.objectives.dspark.visibility import FEW, Visibility


def visibility() -> Visibility:
    """Return what blocks of 3 see of a packed row with a block that only fills up, one padded on the left, and one without any anchor."""
    ids = torch.randint(3, 90, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(12)]])
    labels = ids.masked_fill(mask.eq(0), -100)
    labels[2] = -100
    row = Sequences.of({"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions})
    blocks = draw_blocks(row, 4, 0, 0, size=3, mask_token_id=99)
    blocks.keep[0, -1] = False  # wherever its anchor is
    return Visibility.of(blocks, row)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_every_pair(window: int | None) -> None:
    seen = visibility()
    dense, (queries, keys) = seen.dense(window), seen.sizes
    assert (3, 1, queries, keys) == dense.shape
    for row in range(3):
        for query in range(queries):
            block = query // 3
            anchor = int(seen.anchors[row, block])
            for key in range(keys):
                if key >= 12:
                    sees = (key - 12) // 3 == block
                else:
                    same = seen.documents[row, key] == seen.documents[row, anchor]
                    near = window is None or key >= anchor - window
                    sees = bool(seen.keep[row, block] and same and near and key < anchor)
                assert sees == bool(dense[row, 0, query, key]), (row, query, key)


def test_no_query_sees_nothing() -> None:
    """Its softmax would be NaN."""
    assert visibility().dense(1).any(-1).all()


def attended(seen: Visibility, implementation: str, window: int | None, tensors: list[Tensor]) -> Tensor:
    query, key, value = tensors
    mask: Any = seen.mask(implementation, window)
    if implementation == "sdpa":
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, block_mask=mask)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 2])
def test_the_sparse_mask_is_the_dense_one(window: int | None) -> None:
    seen = visibility()
    queries, keys = seen.sizes
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, 2, length, 8, generator=generator) for length in (queries, keys, keys)]

    found, expected = (attended(seen, name, window, tensors) for name in ("flex_attention", "sdpa"))

    torch.testing.assert_close(expected, found)


def test_masks_are_made_once() -> None:
    seen = visibility()
    assert seen.dense(2) is seen.dense(2)
    assert seen.sparse() is seen.mask("flex_attention")


def test_the_dense_mask_is_for_what_is_small_or_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchturbo.objectives.dspark import visibility as module

    seen = visibility()
    assert seen.sizes[0] * seen.sizes[1] < FEW
    monkeypatch.setattr(module, "_has_flex", lambda device: True)
    assert seen.implementation(64) == "sdpa"
    monkeypatch.setattr(module, "FEW", 10)
    assert seen.implementation(64) == "flex_attention"
    assert seen.implementation(8) == "sdpa"
    with torch.autocast("cpu", torch.bfloat16):
        assert seen.implementation(64) == "sdpa"
    monkeypatch.undo()
    monkeypatch.setattr(module, "FEW", 10)
    assert seen.implementation(64) == "sdpa"  # on a CPU it has no gradients


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention is compiled and differentiated on CUDA")
def test_a_draft_through_the_sparse_mask_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    import dspark_models
    import parity

    from torchturbo.objectives.dspark import visibility as module

    model = dspark_models.model(spec={"block_size": 4, "head_dim": 16})
    other = copy.deepcopy(model)
    steps = []
    for one, few in ((model, FEW), (other, 0)):
        monkeypatch.setattr(module, "FEW", few)
        engine = parity.prepared(one.cuda(), dspark_models.settings(mixed_precision="fp32"))
        window = [{name: value.cuda() for name, value in batch.items()} for batch in parity.batches(1, length=64)]
        steps.append(parity.step(engine, one, window))
    parity.assert_equal(steps[1], steps[0], 1e-3)
