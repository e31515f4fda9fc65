"""The model of a run of several ranks: on the meta device with its source of weights, or read whole with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from torchturbo.errors import ConfigError
from torchturbo.train.arguments import ModelArguments
from torchturbo.train.model import load_config, load_model, weight_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Return the model as several ranks get it, and its source."""
    arguments = ModelArguments(model_name_or_path=str(folder))
    config = load_config(arguments)
    for name, value in changes.items():
        setattr(config if name != "trust_remote_code" else arguments, name, value)
    source = weight_source(arguments, config)
    return load_model(arguments, config, source), source


def test_with_a_source_the_model_has_no_memory_and_all_else_of_from_pretrained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, source = loaded(folder)
    reference = load_model(ModelArguments(model_name_or_path=str(folder)), None)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.to_dict() == reference.config.to_dict()
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert model.training == reference.training
    source.load(model)
    expected = reference.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert "warning" not in capsys.readouterr().err.lower()


def test_a_head_that_the_files_hold_too_is_tied(tmp_path: Path) -> None:
    tiny.model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = loaded(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_source_knows_the_checkpoints_formats_without_safetensors_too(folder: Path) -> None:
    model, source = loaded(folder)
    assert set(source.dtypes(model).values()) == {torch.bfloat16}
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    torch.save(load_file(folder / "weights.safetensors"), folder / "pytorch_model.bin")
    (folder / "weights.safetensors").unlink()
    model, source = loaded(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert set(source.dtypes(model).values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}, "trust_remote_code": True},
            "its code is its own, which may compute with weights while it is built",
        ),
        ({"quantization_config": {"quant_method": "none"}}, "it is quantised"),
        ({"transformers_weights": "model.safetensors"}, "its configuration names a weight file of its own"),
    ],
)
def test_what_can_not_be_read_by_slices_is_read_whole_with_one_warning(
    folder: Path, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[dict[str, Any]] = []

    def from_pretrained(name: str, **settings: Any) -> tuple[str, dict[str, Any]]:
        asked.append(settings)
        return "the model", {"missing_keys": set()}

    monkeypatch.setattr("torchturbo.train.model.AutoModelForCausalLM.from_pretrained", from_pretrained)
    model, _ = loaded(folder, **changes)
    assert model == "the model"
    assert "device_map" not in asked[0]
    lines = [line for line in capsys.readouterr().err.splitlines() if str(folder) in line]
    assert len(lines) == 1
    assert f"{folder}: {reason}, so every rank reads the whole model and holds it until it is sharded" in lines[0]


def test_without_safetensors_it_is_read_whole_with_one_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model, _ = loaded(folder)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert f"{folder}: it has no safetensors files, so every rank reads the whole model" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["one", "several"])
def test_weights_that_do_not_fit_are_told_alike_with_their_file(folder: Path, ranks: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight"], tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    arguments = ModelArguments(model_name_or_path=str(folder))
    config = load_config(arguments)
    with pytest.raises(ConfigError) as raised:
        load_model(arguments, config, weight_source(arguments, config) if ranks == "several" else None)
    assert str(raised.value).splitlines() == [
        f"--model_name_or_path: {folder} lacks 1 of the model's weights: model.layers.0.input_layernorm.weight; "
        "use the whole model, as save_pretrained writes it",
        f"{folder / 'model.safetensors'}: holds model.layers.0.mlp.experts.down_proj as [3, 32, 24], the model expects "
        "[4, 32, 24]; use the config.json that belongs to these weights",
    ]
