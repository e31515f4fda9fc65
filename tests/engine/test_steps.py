"""Each step on a model: two values of its key, and what the engine then does differently."""

from __future__ import annotations

import os
from typing import Any

import pytest
import tiny
import torch

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.steps.determinism import restored_determinism
from torchturbo.errors import ConfigError
from torchturbo.runtime.cpu import CpuRuntime

IDS = torch.arange(3, 15)[None]


def prepared(model: Any, *words: str, **facts: Any) -> tuple[Any, Engine]:
    config: EngineConfig = build_from_args(parse_torchturbo_args(words)[0])
    engine = Engine(config, Context(**facts))
    with restored_determinism():
        return engine.prepare(model), engine


def backward(model: Any, engine: Engine) -> None:
    with engine.autocast():
        model(input_ids=IDS, labels=IDS).loss.backward()


# ---- determinism ----


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_algorithms_are_torchs_strict_mode(wanted: bool) -> None:
    """On, torch fills fresh memory with NaN and refuses what has no deterministic form; off, it does not."""
    words = ["--tt_use_deterministic_algorithms"] if wanted else []
    with restored_determinism():
        Engine(build_from_args(parse_torchturbo_args(words)[0]), Context()).prepare(tiny.model())

        assert wanted == torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert wanted == bool(torch.empty(8).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_runtimes_variables_are_set_and_the_users_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device needs in the environment comes from its runtime."""

    class Needy(CpuRuntime):
        def deterministic_environment(self) -> dict[str, str]:
            return {"TT_TEST_UNSET": "1", "TT_TEST_SET": "1"}

    monkeypatch.setenv("TT_TEST_SET", "mine")
    monkeypatch.setenv("TT_TEST_UNSET", "")
    monkeypatch.delenv("TT_TEST_UNSET")

    prepared(tiny.model(), "--tt_use_deterministic_algorithms", runtime=Needy())

    assert (os.environ["TT_TEST_UNSET"], os.environ["TT_TEST_SET"]) == ("1", "mine")


# ---- precision ----


@pytest.mark.parametrize(("value", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), (None, torch.float32)])
def test_the_forward_pass_runs_in_the_format_asked_for(value: str | None, dtype: torch.dtype) -> None:
    """Matrix products are in it; parameters and their gradients are fp32 either way."""
    model, engine = prepared(tiny.model(), *(["--tt_mixed_precision", value] if value else []))
    formats = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: formats.append(output.dtype))

    backward(model, engine)

    assert {dtype} == set(formats)
    assert {torch.float32} == {parameter.dtype for parameter in model.parameters()}
    assert {torch.float32} == {parameter.grad.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("value", ["bf16", "fp32"])
def test_a_bf16_checkpoint_is_trained_in_fp32_parameters(value: str) -> None:
    """Frozen ones may stay as they are under autocast, and must match without it."""
    model = tiny.model().to(torch.bfloat16)
    model.model.embed_tokens.weight.requires_grad_(False)

    model, engine = prepared(model, "--tt_mixed_precision", value)
    backward(model, engine)

    frozen = torch.bfloat16 if value == "bf16" else torch.float32
    assert frozen == model.model.embed_tokens.weight.dtype
    assert {torch.float32} == {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}


# ---- activation checkpointing ----


def layer_passes(*words: str) -> list[bool]:
    """Return, for each pass through a layer's attention in one step, whether autograd was recording."""
    model, engine = prepared(tiny.model(), *words)
    model.train()
    passes: list[bool] = []
    # Attention, not the MLP: recomputing stops at the last tensor that backward needs.
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: passes.append(torch.is_grad_enabled()))
    backward(model, engine)
    return passes


def test_activation_checkpointing_recomputes_the_layers() -> None:
    """Twice through a layer with it, once without; the default is with."""
    assert len(layer_passes()) == 2
    assert len(layer_passes("--tt_gradient_checkpointing", "true")) == 2
    assert len(layer_passes("--tt_gradient_checkpointing", "false")) == 1


def test_reentrant_checkpointing_records_only_the_second_pass() -> None:
    """That is the difference between torch's two kinds."""
    assert layer_passes("--tt_ac_use_reentrant", "false") == [True, True]
    assert layer_passes("--tt_ac_use_reentrant", "true") == [False, True]


def test_turning_it_off_beats_a_model_that_had_it_on() -> None:
    """The engine is the one owner of the switch."""
    model = tiny.model()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()

    prepared(model, "--tt_gradient_checkpointing", "false")

    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_frozen_embeddings_still_train_the_layers(reentrant: str) -> None:
    """Reentrant checkpointing alone would leave every layer without a gradient."""
    model = tiny.model()
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)

    model, engine = prepared(model, "--tt_ac_use_reentrant", reentrant)
    model.train()
    backward(model, engine)

    assert model.model.layers[0].mlp.up_proj.weight.grad.norm() > 0


def test_gradients_are_the_same_with_and_without_it() -> None:
    """Recomputing changes memory, not numbers."""
    grads = []
    for words in (["--tt_gradient_checkpointing", "false"], [], ["--tt_ac_use_reentrant", "true"]):
        model, engine = prepared(tiny.model(), *words)
        model.train()
        backward(model, engine)
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


class Unsupported(torch.nn.Linear):
    """A model without checkpointing."""


def test_a_model_without_it_warns_once_by_default(logged: list[str]) -> None:
    """The default must not keep a model from training."""
    prepared(Unsupported(2, 2))

    (line,) = [line for line in logged if "activation checkpointing" in line]
    assert line.startswith("Unsupported does not support activation checkpointing: training without it")


def test_a_model_without_it_is_an_error_where_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever sets it must not find it ignored."""
    with pytest.raises(ConfigError):
        prepared(Unsupported(2, 2), "--tt_gradient_checkpointing", "true")

    line = capsys.readouterr().err
    assert "--tt_gradient_checkpointing: activation_checkpointing.enabled: Unsupported does not support" in line


# ---- losses ----


def test_losses_stay_with_the_framework_where_they_are_not_token_cross_entropy() -> None:
    """An own loss function is somebody else's contract."""
    own = tiny.model()
    own.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()

    assert prepared(own)[1].context.normaliser is None
    assert prepared(Unsupported(2, 2))[1].context.normaliser is None
    assert prepared(tiny.model())[1].context.normaliser is not None
