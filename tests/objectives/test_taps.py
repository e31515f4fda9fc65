"""Taps: what an objective sees of a training forward, when, and what is left afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import dspark_models
import mtp_models
import parity
import pytest
import tiny
import torch
from ranks import run_ranks

from torchturbo.objectives.heads import ExtraHeads, attach, detach, extra_heads
from torchturbo.objectives.taps import Taps


def mtp_model() -> Any:
    """Return a model that gets two serial heads."""
    return mtp_models.model("glm4_moe", num_nextn_predict_layers=2)


def tapped(model: Any) -> tuple[Taps, list[dict[str, Any]]]:
    """Return taps of a model's first layer, and a list of what they hold at the end of each forward."""
    taps, seen = Taps(model, model), []
    call = taps.watch(model.model.layers[0])

    def look(*args: Any) -> None:
        seen.append(
            {
                "batch": None if taps.batch is None else set(taps.batch),
                "mask": call.kwargs.get("attention_mask"),
                "output": call.output,
            }
        )

    model.lm_head.register_forward_hook(look)
    return taps, seen


def test_they_hold_a_training_forward_and_then_nothing() -> None:
    """The caller's arguments by name, a layer's arguments and its output."""
    model = tiny.model().train()
    taps, seen = tapped(model)
    ids = torch.arange(3, 11)[None]

    model(ids, labels=ids)

    assert {"input_ids", "labels"} == seen[0]["batch"]
    assert (1, 8, 32) == tuple(seen[0]["output"].shape)
    assert not taps.open
    assert [None] == [call.output for call in taps._calls]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_and_evaluation_leave_nothing(reentrant: bool) -> None:
    """A layer that runs again in backward would keep its tensors until the next forward."""
    model = tiny.model().train()
    taps, seen = tapped(model)
    tiny.checkpoint(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    ids = torch.arange(3, 11)[None]

    model(input_ids=ids, labels=ids).loss.backward()
    model.eval()(input_ids=ids)

    assert [None] == [call.output for call in taps._calls]
    assert [True, False] == [entry["batch"] is not None for entry in seen]


def test_a_training_mode_without_gradients_is_no_training_forward() -> None:
    """Nothing is learned from it."""
    model = tiny.model().train()
    _, seen = tapped(model)

    with torch.no_grad():
        model(input_ids=torch.arange(3, 11)[None])

    assert [{"batch": None, "mask": None, "output": None}] == seen


@pytest.mark.parametrize("make", [mtp_model, dspark_models.model], ids=["serial heads", "draft"])
def test_objectives_add_nothing_without_gradients(make: Callable[[], Any]) -> None:
    """The model's loss is its own."""
    model, batch = make(), parity.batches(1, vocabulary=64)[0]
    engine = parity.prepared(model, dspark_models.settings())
    names = [term.name for term in engine.context.normaliser.terms]
    with torch.no_grad():
        found = model(**batch).loss
        values = [term.value(None, batch) for term in engine.context.normaliser.terms]
        engine.release(model)
        expected = model(**batch).loss

    assert names in (["mtp_1_loss", "mtp_2_loss"], ["dspark_loss"])
    assert [None] * len(names) == values
    assert float(expected) == float(found)


def test_an_error_in_the_forward_ends_them() -> None:
    """The next one begins anew."""
    model = tiny.model().train()
    taps, _ = tapped(model)

    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[400]]))

    assert not taps.open


def test_a_copy_has_none_and_removal_takes_all() -> None:
    """Hooks of a copied or pickled model do nothing; a removed tap is gone."""
    model = tiny.model().train()
    taps, _ = tapped(model)
    model.lm_head._forward_hooks.clear()
    ids = torch.arange(3, 11)[None]

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(input_ids=ids)
        assert not taps.open
    taps.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def whole_batch(rank: int) -> tuple[list[int], list[int]]:
    """Return the length of the batch that taps see, and of the layer's states, under sequence parallelism."""
    model = tiny.model()
    seen: list[int] = []

    engine = parity.prepared(model, parity.config(parallel_plan={"sp_size": 2}), 2, rank)
    engine.release(model)
    taps = Taps(model, model)
    call = taps.watch(model.model.layers[0])
    engine.prepare(model.train())
    model.lm_head.register_forward_hook(
        lambda *args: seen.extend((taps.batch["input_ids"].shape[1], call.output.shape[1]))
    )
    model(**parity.batches(1)[0]).loss.backward()
    return seen[:1], seen[1:2]


def test_they_see_the_whole_micro_batch_before_it_is_shared() -> None:
    """The batch of 16 tokens that the caller gave, and the layers' 8 of this rank."""
    assert [([16], [8])] * 2 == run_ranks(2, whole_batch)


def test_heads_are_attached_once_and_taken_out() -> None:
    """A model with something of that name is refused."""
    model, heads = tiny.model(), ExtraHeads()
    attach(model, heads)

    assert heads is extra_heads(model)
    with pytest.raises(ValueError, match="has a mtp of its own: ExtraHeads"):
        attach(model, ExtraHeads())
    assert heads is detach(model)
    assert extra_heads(model) is None
    assert detach(model) is None
    assert not heads.owns("model.layers.2.enorm.weight")
