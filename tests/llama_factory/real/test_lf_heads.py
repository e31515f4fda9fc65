"""Extra heads and router losses under LLaMA-Factory: read from the model's folder, trained, and written back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import headed
from torchturbo.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GLM-4.5 of two layers with one head."""
    return headed.save(tmp_path_factory.mktemp("glm"), "glm4_moe", "float32")


@pytest.mark.parametrize("method", ["full", "freeze"])
def test_heads_are_trained_and_exported(method: str, folder: Path, settings: Callable[..., Path], engine: Any) -> None:
    """Also where LLaMA-Factory freezes all layers but the last: it knows nothing of heads."""
    path = settings(
        model_name_or_path=str(folder), finetuning_type=method, freeze_trainable_layers=1, max_steps=1, weight_decay=0.0
    )
    done = engine(path, "--tt_enable_mtp", "--tt_moe_aux_loss_coeff", "0.01")

    before, after = headed.stored(folder), headed.stored(done.output)
    assert {name: one.shape for name, one in before.items()} == {name: one.shape for name, one in after.items()}
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight"} <= moved
    frozen = [name for name in moved if name.startswith(("model.layers.0.", "model.embed_tokens"))]
    assert bool(frozen) is (method == "full")
    assert {"mtp_1_loss", "moe_aux_loss"} < done.history[0].keys()


def test_adapters_and_heads_are_refused_before_the_model_is_read(
    folder: Path, settings: Callable[..., Path], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LLaMA-Factory's own name for it."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="lora saves adapters without the model, and the extra heads would be lost"):
        engine(settings(model_name_or_path=str(folder), finetuning_type="lora"), "--tt_enable_mtp")


def test_a_model_without_heads_is_told_so_before_it_is_read(
    settings: Callable[..., Path], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check of `torchturbo train`."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="mtp.enabled"):
        engine(settings(), "--tt_enable_mtp")
