"""Exports of adapters from sharded PEFT models, against what PEFT itself writes from one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.ranks import run_ranks
from torchturbo.checkpoint.hf_export import export

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora and a whole head": {"use_dora": True, "modules_to_save": ["lm_head"]},
}


def adapted(folder: Path, **settings: Any) -> Any:
    """Return a PEFT model whose adapters are no zeros."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def export_sharded(rank: int, folder: Path, out: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    for at, settings in enumerate(SETTINGS.values()):
        model = adapted(folder, **settings)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        export(model, out / str(at), saved_dtypes={})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    run_ranks(2, export_sharded, base, out)
    return out


@pytest.mark.parametrize("kind", SETTINGS)
def test_adapters_are_what_peft_writes(kind: str, base: Path, exported: Path, tmp_path: Path) -> None:
    folder = exported / str(list(SETTINGS).index(kind))
    reference = adapted(base, **SETTINGS[kind])
    reference.save_pretrained(tmp_path)
    assert {path.name for path in folder.iterdir()} == {path.name for path in tmp_path.iterdir()}
    got, expected = (load_file(one / "adapter_model.safetensors") for one in (folder, tmp_path))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    configs = [json.loads((one / "adapter_config.json").read_text()) for one in (folder, tmp_path)]
    for config in configs:
        config["target_modules"].sort()  # PEFT holds them in a set
    assert configs[0] == configs[1]


def test_adapters_load_onto_the_base_model(base: Path, exported: Path) -> None:
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), exported / "0")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, adapted(base).eval()(input_ids=ids).logits)


def test_adapters_inside_a_transformers_model_are_exported_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig

    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.1")  # what is installed may be older
    model = AutoModelForCausalLM.from_pretrained(base)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    export(model, tmp_path / "one", saved_dtypes={})
    model.save_pretrained(tmp_path / "two")
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()}
    assert "adapter_model.safetensors" in names
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_adapters_are_cast_to_the_format_they_came_in(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    export(model, tmp_path, saved_dtypes={name: torch.bfloat16 for name, _ in model.named_parameters()})
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}
