"""Which models are diffusion models, and the tokens that they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchturbo.objectives.diffusion.models import (
    MODELS,
    DiffusionModel,
    attribute_problem,
    fill_token,
    is_diffusion_model,
    mask_token,
    register,
    rounded_up,
    token_problems,
)


def config(**values: Any) -> Any:
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (config(model_type="qwen3"), False),
        (config(model_type="llada2_moe"), True),
        (config(model_type="llada2_moe", is_diffusion_model=False), False),
        (config(model_type="qwen3", is_diffusion_model=True), True),
        (config(config=config(model_type="llada2_moe")), True),
        (config(config=config(model_type="qwen3"), is_diffusion_model=True), True),
        (config(config=config(model_type="qwen3", is_diffusion_model=False), is_diffusion_model=True), False),
        (config(get_base_model=lambda: config(config=config(model_type="llada2_moe"))), True),
        (config(), False),
    ],
    ids=["other", "type", "denied", "configuration", "model", "class", "class denied", "peft", "nothing"],
)
def test_a_model_is_one_by_type_or_by_what_it_says(model: Any, expected: bool) -> None:
    """What its configuration says wins, then its class."""
    assert expected == is_diffusion_model(model)


def test_a_type_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plugin."""
    monkeypatch.delitem(MODELS, "made_up", raising=False)
    row = register(DiffusionModel("Made up", "made_up", mask_token=7))
    assert row is MODELS["made_up"]
    assert is_diffusion_model(config(model_type="made_up"))
    assert 7 == mask_token(config(model_type="made_up"))
    monkeypatch.delitem(MODELS, "made_up")


def test_the_mask_token_is_the_configurations_the_tokenizers_or_the_familys() -> None:
    """In this order."""
    family, tokenizer = config(model_type="llada2_moe"), config(mask_token_id=5)
    assert 4 == mask_token(config(model_type="llada2_moe", mask_token_id=4), tokenizer)
    assert 5 == mask_token(family, tokenizer)
    assert 5 == mask_token(family, config(tokenizer=tokenizer))
    assert 156895 == mask_token(family)
    assert mask_token(config(model_type="qwen3")) is None


def test_the_filler_is_padding_or_the_end() -> None:
    """The tokenizer's before the configuration's."""
    assert 1 == fill_token(config(pad_token_id=2, eos_token_id=3), config(pad_token_id=1))
    assert 2 == fill_token(config(pad_token_id=2, eos_token_id=3), config(eos_token_id=4))
    assert 4 == fill_token(config(pad_token_id=None, eos_token_id=3), config(eos_token_id=4))
    assert 3 == fill_token(config(eos_token_id=[3, 4]))
    assert fill_token(config()) is None


def test_what_is_missing_is_told_at_once() -> None:
    """Both tokens."""
    found = token_problems(config(model_type="qwen3", vocab_size=10))
    assert ["names a mask token" in found[0][0], "nothing to fill" in found[1][0]] == [True, True]
    (beyond,) = token_problems(config(model_type="qwen3", vocab_size=10, mask_token_id=10, pad_token_id=0))
    assert "the mask token 10 is none of the model's 10 tokens" == beyond[0]
    (both,) = token_problems(config(model_type="qwen3", vocab_size=10, mask_token_id=3, eos_token_id=3))
    assert "the mask token 3 is the token that fills up" in both[0]


@pytest.mark.parametrize("said", [1, 0, "true", []])
def test_an_attribute_that_is_neither_is_told(said: Any) -> None:
    """And not passed over."""
    found = attribute_problem(config(is_diffusion_model=said))
    assert found is not None and f"is_diffusion_model is {said!r}" in found[0]
    assert attribute_problem(config(is_diffusion_model=True)) is None
    assert attribute_problem(config()) is None


@pytest.mark.parametrize(("length", "block", "expected"), [(33, 32, 64), (64, 32, 64), (1, 32, 32), (0, 4, 0)])
def test_lengths_are_rounded_up(length: int, block: int, expected: int) -> None:
    """To whole blocks."""
    assert expected == rounded_up(length, block)
