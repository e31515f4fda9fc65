"""Published LLaDA2-MoE folders: they load without their own code, and exports give back what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests import parity
from tests.models import llada2_tiny as llada2
from tests.ranks import run_ranks
from torchturbo.checkpoint.hf_export import export
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.models.llada2.modeling import LLaDA2MoeModel, LLaDA2MoeModelLM
from torchturbo.train.arguments import ModelArguments
from torchturbo.train.model import load_config, load_model, weight_source

CODE = {"configuration_llada2_moe.py", "modeling_llada2_moe.py"}
Published = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("hub") / "LLaDA2.0-tiny"
    return folder, llada2.publish(folder)


def streamed(folder: Path) -> tuple[Any, WeightSource]:
    """Return a model that was made without memory and then read from the files, as a sharded one is."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    source = WeightSource.find(str(folder))
    source.load(model)
    return model, source


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    found.pop("transformers_version")
    found["dtype"] = found.pop("torch_dtype", None) or found.get("dtype")  # the key's older name
    return found


def assert_published(folder: Path, published: Published) -> None:
    """Hold a folder against the published one: names, formats, every bit, the configuration and the code."""
    found, expected = load_file(folder / "model.safetensors"), published[1]
    assert llada2.published_names() == sorted(found) == sorted(expected)
    assert {name: one.dtype for name, one in expected.items()} == {name: one.dtype for name, one in found.items()}
    assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]
    assert config_of(published[0]) == config_of(folder)
    assert {(name, (published[0] / name).read_text()) for name in CODE} == {
        (name, (folder / name).read_text()) for name in CODE
    }


@pytest.mark.parametrize("trusted", [None, False, True])
def test_a_published_folder_loads_without_its_own_code(published: Published, trusted: bool | None) -> None:
    """It is neither asked for nor run, not even where it is trusted."""
    folder, tensors = published
    given: dict[str, Any] = {} if trusted is None else {"trust_remote_code": trusted}
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **given)

    assert LLaDA2MoeModelLM is type(model)
    assert LLaDA2MoeModel is type(AutoModel.from_pretrained(folder, **given))
    assert not any(told.values())
    held = llada2.apart(dict(model.state_dict()))
    assert [] == [name for name in tensors if not torch.equal(tensors[name].float(), held[name])]


def test_what_is_saved_is_what_was_published(published: Published, tmp_path: Path) -> None:
    """By ``save_pretrained``; the bias of the routers stays float32 in a model that is loaded in bf16."""
    model = AutoModelForCausalLM.from_pretrained(published[0])
    model(torch.ones(1, 4, dtype=torch.long))  # Transformers notes things in the configuration meanwhile
    model.save_pretrained(tmp_path)

    assert torch.bfloat16 == model.dtype
    assert_published(tmp_path, published)


def test_streamed_weights_and_exports_are_the_published_ones(published: Published, tmp_path: Path) -> None:
    """A model in float32 that was read by slices is exported in the formats of its files."""
    model, source = streamed(published[0])
    reference = AutoModelForCausalLM.from_pretrained(published[0], dtype=torch.float32)
    export(model, tmp_path, saved_dtypes=source.dtypes(model))

    expected = reference.state_dict()
    assert [] == [name for name, one in model.state_dict().items() if not torch.equal(expected[name], one)]
    torch.testing.assert_close(reference.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert_published(tmp_path, published)


def reshare(rank: int, folder: Path, parent: Path) -> list[int]:
    """Read a folder into models that two ranks share, and export them again; return the bytes that this rank read."""
    read = []
    for ep_size in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        parity.prepared(model, parity.config(parallel_plan={"ep_size": ep_size}), 2, rank)
        source = WeightSource.find(str(folder))
        read.append(source.load(model).bytes_read)
        export(model, parent / str(ep_size), saved_dtypes=source.dtypes(model))
    return read


def test_two_ranks_that_share_the_weights_give_back_the_published_ones(published: Published, tmp_path: Path) -> None:
    """Sharded, and with experts divided; each rank reads half of it, and the biases of the routers."""
    total = sum(tensor.nbytes for tensor in published[1].values())
    read = run_ranks(2, reshare, published[0], tmp_path)

    assert_published(tmp_path / "1", published)
    assert_published(tmp_path / "2", published)
    assert all(total / 2 <= one <= total / 2 * 1.01 for rank in read for one in rank)


def test_tensors_that_are_missing_or_unknown_are_reported(published: Published, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "other", dict(published[1])
    folder.mkdir()
    (folder / "config.json").write_text((published[0] / "config.json").read_text())
    del tensors["model.layers.1.attention.dense.weight"], tensors["model.layers.2.mlp.gate.expert_bias"]
    tensors["model.layers.0.attention.gate.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    source = WeightSource.find(str(folder))
    filled, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)

    assert ["model.layers.0.attention.gate.weight"] == source.recipes(model).unexpected
    missing = ["model.layers.1.attention.dense.weight", "model.layers.2.mlp.gate.expert_bias"]
    assert [f"lacks 2 of the model's weights: {', '.join(missing)}"] == [one.message for one in source.problems(model)]
    assert missing == sorted(told["missing_keys"])
    assert not filled.model.layers[2].mlp.gate.expert_bias.any()
    assert {"model.layers.0.attention.gate.weight"} == set(told["unexpected_keys"])


def test_an_expert_that_is_missing_is_reported(published: Published, tmp_path: Path) -> None:
    """The experts of a layer are one tensor of the model: it can't be made."""
    folder, tensors = tmp_path / "other", dict(published[1])
    folder.mkdir()
    (folder / "config.json").write_text((published[0] / "config.json").read_text())
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"], tensors["model.layers.2.mlp.experts.0.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    messages = "\n".join(problem.message for problem in WeightSource.find(str(folder)).problems(model))

    assert "model.layers.1.mlp.experts.gate_up_proj" in messages
    assert "holds model.layers.2.mlp.experts.down_proj as [7, 32, 24], the model expects [8, 32, 24]" in messages


def test_code_that_is_not_there_is_not_referred_to(published: Published, tmp_path: Path) -> None:
    """A reference to a file of nowhere would keep others from loading the export; one to a repository stays."""
    config = AutoConfig.from_pretrained(published[0])
    config._name_or_path = str(tmp_path / "moved")
    config.save_pretrained(tmp_path / "without")
    config.auto_map["AutoModel"] = "inclusionAI/LLaDA2.0-mini--modeling_llada2_moe.LLaDA2MoeModel"
    config.save_pretrained(tmp_path / "hub")
    made = llada2.model().config
    made.save_pretrained(tmp_path / "made")

    assert "auto_map" not in config_of(tmp_path / "without")
    assert {"AutoModel": config.auto_map["AutoModel"]} == config_of(tmp_path / "hub")["auto_map"]
    assert "auto_map" not in config_of(tmp_path / "made")
    assert llada2.AUTO_MAP.keys() == config.auto_map.keys()  # the configuration itself stays as it was
    assert not list(tmp_path.rglob("*.py"))


def test_a_folder_is_saved_onto_itself(tmp_path: Path) -> None:
    """Nothing is copied onto itself, and nothing is lost."""
    tensors = llada2.publish(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")

    assert_published(tmp_path / "model", (tmp_path / "model", tensors))


def test_tied_heads_stay_tied(tmp_path: Path) -> None:
    """The published models have none, but the configuration knows them. Transformers is told which loss is meant."""
    model = llada2.model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again, _ = streamed(tmp_path)

    assert again.lm_head.weight is again.model.word_embeddings.weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert "ForCausalLM" == again.loss_type


def test_ranks_read_their_share_where_published_code_is_trusted(published: Published) -> None:
    """That code does not make the model; so nothing keeps ``torchturbo train`` from reading it by slices."""
    arguments = ModelArguments(model_name_or_path=str(published[0]), trust_remote_code=True)
    config = load_config(arguments)
    source = weight_source(arguments, config)
    model = load_model(arguments, config, source)

    assert {"meta"} == {weight.device.type for weight in model.parameters()}
    source.load(model)
    held = llada2.apart(dict(model.state_dict()))
    assert [] == [name for name, one in published[1].items() if not torch.equal(one.float(), held[name])]
