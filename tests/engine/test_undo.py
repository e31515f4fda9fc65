"""What the engine puts into a model it can take out again: for whoever uses the model next, another engine included."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny
import tiny_vlm
import torch

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.objectives.chunked import ChunkedModel
from torchturbo.objectives.normalise import NormalisedLoss

IDS = torch.arange(3, 15)[None]
EVERYTHING = ["--tt_enable_chunk_loss", "--tt_loss_chunk_size", "4", "--tt_gradient_checkpointing", "true"]
SWITCH = {"gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"}
"""What Transformers' own switch for checkpointing leaves behind when it is off."""


def engine(*words: str) -> Engine:
    return Engine(build_from_args(parse_torchturbo_args(words)[0]), Context())


def traces(model: Any) -> dict[str, Any]:
    """Return what an engine could have left on a model's modules, hooks and parameters."""
    return {
        name: (
            type(module),
            sorted(vars(module).keys() - SWITCH),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            [parameter.requires_grad for parameter in module.parameters(recurse=False)],
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "words", [[], ["--tt_op_policy", "native"], EVERYTHING], ids=["default", "native", "everything"]
)
def test_a_released_model_is_as_its_class_wrote_it(words: list[str]) -> None:
    """Classes, instance attributes, hooks; and the loss in training is the plain one, with its logits."""
    model, plain = tiny.model(), tiny.model()
    before = traces(plain)
    prepared = engine(*words)

    prepared.prepare(model)
    assert isinstance(model.loss_function, NormalisedLoss)
    prepared.release(model)

    assert before == traces(model)
    output, expected = model.train()(input_ids=IDS, labels=IDS), plain.train()(input_ids=IDS, labels=IDS)
    assert torch.equal(expected.loss, output.loss)
    assert torch.equal(expected.logits, output.logits)


def test_engines_on_one_model_leave_one_set_of_hooks() -> None:
    """The plugins of the first run must not watch the third."""
    model = tiny.model()
    for _ in range(3):
        engine().prepare(model)

    assert 1 == len(model._forward_hooks)


def test_another_engine_finds_the_model_as_it_was() -> None:
    """Optimised operators of the first are no obstacle to the chunks of the second."""
    model = tiny.model()
    engine("--tt_op_policy", "auto").prepare(model)
    second = engine(*EVERYTHING)

    assert [] == second.problems(model)
    assert not isinstance(model.loss_function, NormalisedLoss)
    second.prepare(model)
    assert isinstance(model, ChunkedModel)


@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector", "language_model"])
def test_what_a_policy_froze_is_trained_again_without_it(part: str) -> None:
    """And what the user froze stays frozen."""
    model = tiny_vlm.model("llava")
    own = next(iter(model.parameters()))
    own.requires_grad_(False)
    before = traces(model)
    frozen = engine(f"--tt_freeze_{part}")
    frozen.prepare(model)
    assert before != traces(model)

    frozen.release(model)

    assert before == traces(model)


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_of_a_prepared_model_has_the_plain_loss(way: str) -> None:
    """An average of the weights, a worker process: neither takes the run's plugins and trainer along."""
    model = engine("--tt_op_policy", "native").prepare(tiny.model())

    other = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))

    assert isinstance(model.loss_function, NormalisedLoss)
    assert not isinstance(other.loss_function, NormalisedLoss)
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, other(input_ids=IDS, labels=IDS).loss)


def test_a_cache_that_an_earlier_engine_turned_off_comes_back() -> None:
    """What the second saves and releases generates as the model did before both."""
    model = tiny.model()
    assert model.config.use_cache
    engine().prepare(model)
    second = engine()
    second.prepare(model)
    assert not model.config.use_cache

    with second.cache_as_found(model):
        assert model.config.use_cache
    second.release(model)

    assert model.config.use_cache
