"""Chunked loss under PEFT: adapters on the body, on the head, and a head that is trained beside them."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from test_chunked_loss import assert_same, batch, step

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.model import base_model
from torchturbo.objectives import chunked

CASES = [
    pytest.param({"target_modules": ["q_proj", "v_proj"]}, False, id="frozen head"),
    pytest.param({"target_modules": ["q_proj", "lm_head"]}, True, id="LoRA on the head"),
    pytest.param({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True, id="a copy of the head"),
]


def adapted(**settings: Any) -> Any:
    """Return a model with adapters that are not zero, as they are at their start."""
    torch.manual_seed(0)
    model = get_peft_model(tiny.model(), LoraConfig(r=2, lora_dropout=0.0, **settings))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def prepared(model: Any, *words: str) -> tuple[Any, Engine]:
    config = build_from_args(parse_torchturbo_args(["--tt_enable_chunk_loss", "--tt_loss_chunk_size", "5", *words])[0])
    engine = Engine(config, Context())
    assert [] == engine.problems(model)
    return engine.prepare(model), engine


@pytest.mark.parametrize(("settings", "recompute"), CASES)
def test_loss_and_gradients_are_the_plain_models(settings: dict[str, Any], recompute: bool) -> None:
    """PEFT calls the base model's forward past its hooks; what is frozen gets no gradient."""
    expected = step(adapted(**settings), batch())
    model, _ = prepared(adapted(**settings))

    output = model(**batch())
    actual = step(model, batch())

    assert output.logits is None
    assert recompute == chunked.recomputes(model)
    assert_same(expected, actual)
    assert any(gradient is not None for gradient in actual[1].values())
    assert any(gradient is None for gradient in actual[1].values())


@pytest.mark.parametrize(("settings", "recompute"), CASES)
def test_the_normaliser_scales_it(settings: dict[str, Any], recompute: bool) -> None:
    """Chunks lie below the normaliser, so the window's count divides the sum."""
    mean = step(adapted(**settings), batch())
    model, engine = prepared(adapted(**settings))
    normaliser = engine.context.normaliser
    assert normaliser is not None
    normaliser.denominator = torch.tensor(4.0)
    targets = int((batch()["labels"][:, 1:] != -100).sum())

    with normaliser.applied():
        actual = step(model, batch())

    factor = targets / 4
    expected = mean[0] * factor, {name: None if it is None else it * factor for name, it in mean[1].items()}
    assert_same(expected, actual)


@pytest.mark.parametrize(("settings", "recompute"), CASES)
def test_a_disabled_adapter_and_a_merged_one_work(settings: dict[str, Any], recompute: bool) -> None:
    """Both change what the head's forward computes."""
    plain, model = adapted(**settings), prepared(adapted(**settings))[0]
    for each in (plain, model):
        base_model(each).lm_head.requires_grad_(True)  # so that a gradient goes somewhere without adapters, too

    with plain.disable_adapter(), model.disable_adapter():
        assert_same(step(plain, batch()), step(model, batch()))

    chunked.remove(base_model(model))
    merged = [each.merge_and_unload().train() for each in (plain, model)]
    ids = batch()["input_ids"]
    assert torch.equal(*(each(input_ids=ids).logits for each in merged))


def test_dropout_on_the_head_is_the_same_in_recomputation() -> None:
    """The mask that forward drew is drawn again in backward, so a small step downhill lowers that very loss."""
    torch.manual_seed(0)
    model = get_peft_model(tiny.model(), LoraConfig(r=4, lora_dropout=0.5, target_modules=["lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    model, _ = prepared(model.train())
    adapter = next(parameter for name, parameter in model.named_parameters() if "lora_B" in name)

    def loss() -> Any:
        torch.manual_seed(9)
        return model(**batch("none")).loss

    first = loss()
    first.backward()
    slope = float(adapter.grad.double().square().sum())
    rate = 1e-4 * float(first.detach()) / slope
    with torch.no_grad():
        adapter -= rate * adapter.grad
    fallen = float((first - loss()).detach())

    assert fallen == pytest.approx(rate * slope, rel=0.05)
