"""Chunked loss below FSDP2, which is put around it later: two ranks against one process, in both modes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor, nn

from torchturbo.objectives import chunked

Result = tuple[float, dict[str, Tensor], bool]


class OwnLinear(nn.Linear):
    """A head that has to be recomputed: no plain ``nn.Linear``."""


def rows() -> dict[str, Any]:
    """Return token ids and labels [2, 9] with unequally many targets, and how many they are after the shift."""
    ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :6] = -100
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": int(labels[:, 1:].ne(-100).sum())}


def built(tied: bool, recompute: bool) -> Any:
    model = tiny.model(tie_word_embeddings=tied).train()
    if recompute:
        model.lm_head.__class__ = OwnLinear
    return model


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.clone()


def step(model: Any, inputs: dict[str, Any], ranks: int) -> Result:
    """Return a rank's loss, the gradients of all ranks by name, which FSDP2 averages, and whether there were logits."""
    model.zero_grad()
    output = model(**inputs)
    (output.loss * ranks).backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return float(output.loss.detach()), gradients, output.logits is not None


def sharded(rank: int, tied: bool, alone: bool, recompute: bool) -> tuple[Result, Result]:
    """Shard a prepared model and take a step on this rank's row; then one more after the chunks were taken out."""
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    model = built(tied, recompute)
    chunked.install(model, 3)
    for layer in model.model.layers:
        fully_shard(layer)
    if alone:
        fully_shard(model.lm_head)
        register_fsdp_forward_method(model.lm_head, "loss")
    fully_shard(model)
    mine = {name: value[rank : rank + 1] if torch.is_tensor(value) else value for name, value in rows().items()}

    assert recompute == chunked.recomputes(model)
    first = step(model, mine, 2)
    assert recompute == chunked.recomputes(model)

    chunked.remove(model)
    assert isinstance(model, FSDPModule) and not isinstance(model, chunked.ChunkedModel)
    assert isinstance(model.lm_head, FSDPModule) == alone and not isinstance(model.lm_head, chunked.ChunkedHead)
    assert not hasattr(model.lm_head, "loss")
    assert "FSDPLlamaForCausalLM" == type(model).__name__
    return first, step(model, mine, 2)


@pytest.mark.parametrize("recompute", [False, True], ids=["gradient in forward", "recompute"])
@pytest.mark.parametrize(
    ("tied", "alone"), [(False, True), (False, False), (True, False)], ids=["head alone", "with the root", "tied"]
)
def test_sharded_later_it_is_one_process(tied: bool, alone: bool, recompute: bool) -> None:
    """Loss and every gradient, with chunks and after their removal, which leaves the shards in place."""
    loss, gradients, _ = step(built(tied, recompute), rows(), 1)

    results = run_ranks(2, sharded, tied, alone, recompute)

    for at in range(2):
        assert loss == pytest.approx(sum(result[at][0] for result in results), rel=1e-6)
        for result in results:
            assert (at == 1) == result[at][2]
            assert gradients.keys() == result[at][1].keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(result[at][1][name], gradient, rtol=1e-5, atol=1e-7)
