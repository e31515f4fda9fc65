"""Exports from sharded models: plain ``from_pretrained`` loads them, and finds the trained weights bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.checkpoint import families
from tests.ranks import RankFailed, run_ranks
from torchturbo.checkpoint import hf_export
from torchturbo.checkpoint.hf_export import export
from torchturbo.checkpoint.slices import headers

STEP = 0.0123
"""What "training" adds to each parameter: a change that bf16 rounds."""
Layout = tuple[str, int]
"""A family, and the ranks that its experts are divided over."""

ONE: list[Layout] = [(family, 1) for family in ("tied", "qwen3_moe")]
TWO: list[Layout] = [(family, 2) for family in families.FAMILIES]
FOUR: list[Layout] = [(family, 2) for family in ("untied", "qwen3_moe", "deepseek_v3")]
EVERY: list[Layout] = [(family, ep_size) for family in families.FAMILIES for ep_size in (1, 2, 4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("families")
    return {family: families.save(parent / family, family) for family in families.FAMILIES}


def train(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(STEP)


def sharded(folder: Path, ep_size: int = 1, **settings: Any) -> tuple[Any, dict[str, torch.dtype]]:
    """Return a trained model and the formats of its checkpoint."""
    from torchturbo.checkpoint.weights import WeightSource

    model, source = families.empty(folder), WeightSource.find(str(folder))
    families.shard(model, ep_size, **settings)
    source.load(model)
    train(model)
    return model, source.dtypes(model)


def export_all(rank: int, folders: dict[str, Path], layouts: list[Layout], parent: Path) -> None:
    for family, ep_size in layouts:
        model, formats = sharded(folders[family], ep_size)
        export(model, parent / f"{family}-{ep_size}", saved_dtypes=formats, max_shard_size="40KB")


def expected(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train(model)
    return {name: value.to(dtype) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [(1, ONE), (2, TWO), (4, FOUR), pytest.param(4, EVERY, marks=pytest.mark.full)],
    ids=["1", "2", "4", "all"],
)
def test_an_export_is_the_checkpoint_with_the_trained_weights(
    folders: dict[str, Path], world: int, layouts: list[Layout], tmp_path: Path
) -> None:
    run_ranks(world, export_all, folders, layouts, tmp_path)
    for family, ep_size in layouts:
        before, after = folders[family], tmp_path / f"{family}-{ep_size}"
        model, told = AutoModelForCausalLM.from_pretrained(after, output_loading_info=True)  # not where it was trained
        assert not any(told.values()), family
        assert model.dtype == torch.bfloat16
        found, trained = model.state_dict(), expected(before)
        assert found.keys() == trained.keys()
        assert [name for name in found if not torch.equal(found[name], trained[name])] == [], family
        if family == "bare":
            continue  # the causal model's export has names and a class of its own
        written, read = ({**headers(folder.glob("*.safetensors"))} for folder in (after, before))
        assert {name: one[1:] for name, one in written.items()} == {name: one[1:] for name, one in read.items()}
        configs = [json.loads((folder / "config.json").read_text()) for folder in (after, before)]
        assert configs[0] == configs[1]
        assert (after / "generation_config.json").read_text() == (before / "generation_config.json").read_text()
        index = json.loads((after / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: one.file.name for name, one in written.items()}
        assert index["metadata"] == json.loads((before / "model.safetensors.index.json").read_text())["metadata"]


# ---- one process, and what an export leaves ----


@pytest.fixture
def model() -> Any:
    return tiny.model("qwen3_moe", tie_word_embeddings=True)


def same_files(first: Path, second: Path) -> bool:
    names = {path.name for path in first.iterdir()}
    return names == {path.name for path in second.iterdir()} and all(
        (first / name).read_bytes() == (second / name).read_bytes() for name in names
    )


def test_without_ranks_it_writes_what_save_pretrained_writes(model: Any, tmp_path: Path) -> None:
    export(model, tmp_path / "one", saved_dtypes={})
    model.save_pretrained(tmp_path / "two")
    assert same_files(tmp_path / "one", tmp_path / "two")


def test_a_model_made_in_code_gets_no_prefix_that_a_checkpoint_would_have_lost(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import PrefixChange

    wrapped = [PrefixChange(prefix_to_remove="wrapped")]
    monkeypatch.setattr(hf_export, "conversions", lambda model, add_legacy: wrapped)
    export(model, tmp_path, saved_dtypes={})
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys() - {"lm_head.weight"}
    model._weight_conversions = wrapped  # this one was loaded so
    export(model, tmp_path, saved_dtypes={})
    assert all(name.startswith("wrapped.") for name in load_file(tmp_path / "model.safetensors"))


def test_formats_are_each_tensors_own_and_the_configuration_names_the_most_common(model: Any, tmp_path: Path) -> None:
    formats = dict.fromkeys(model.state_dict(), torch.bfloat16) | {"model.norm.weight": torch.float32}
    export(model, tmp_path, saved_dtypes=formats)
    written = load_file(tmp_path / "model.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == {"model.norm.weight"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_model_is_left_as_it_was(model: Any, tmp_path: Path) -> None:
    model.config.architectures = None
    before, weights = model.config.to_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    export(model, tmp_path, saved_dtypes=dict.fromkeys(weights, torch.bfloat16))
    assert model.config.to_dict() == before
    assert not hasattr(model, "_weight_conversions")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_key_value_cache_is_written_as_found(model: Any, tmp_path: Path) -> None:
    for use_cache in (True, False):
        model.config.use_cache = use_cache
        export(model, tmp_path, saved_dtypes={})
        assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is use_cache


def test_files_of_an_earlier_model_go(model: Any, tmp_path: Path) -> None:
    export(model, tmp_path, saved_dtypes={}, max_shard_size="20KB")
    several = {path.name for path in tmp_path.glob("model*")}
    assert len(several) > 3
    (tmp_path / "notes.txt").touch()
    export(model, tmp_path, saved_dtypes={})
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    export(model, tmp_path, saved_dtypes={}, max_shard_size="20KB")
    assert {path.name for path in tmp_path.glob("model*")} == several
    assert (tmp_path / "notes.txt").exists()


def test_no_more_than_a_file_and_a_group_is_held(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = [], 20_000
    take = hf_export._Writer.take

    def watch(self: hf_export._Writer, gathered: dict[str, torch.Tensor]) -> None:
        take(self, gathered)
        held.append(sum(tensor.nbytes for tensor in self.waiting.values()))

    monkeypatch.setattr(hf_export._Writer, "take", watch)
    export(model, tmp_path, saved_dtypes={}, max_shard_size=most)
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert max(held) <= most + largest < sum(parameter.nbytes for parameter in model.parameters()) / 2


def export_after_evaluating(rank: int, folder: Path, out: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, _ = sharded(folder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])  # leaves the root's parameters whole and plain, and in bf16
    export(model, out, saved_dtypes={})


def test_a_model_that_was_evaluated_is_exported_from_its_shards(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, export_after_evaluating, folders["untied"], tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    trained = expected(folders["untied"], torch.float32)
    assert [name for name, value in trained.items() if not torch.equal(value, found[name])] == []


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

OwnConfig.register_for_auto_class()
OwnForCausalLM.register_for_auto_class("AutoModelForCausalLM")
"""


def export_own_code(rank: int, code: Path, out: Path) -> None:
    import importlib
    import sys

    from torch.distributed.fsdp import fully_shard

    sys.path.insert(0, str(code))
    own = importlib.import_module("own_code")
    settings = tiny.model("llama").config.to_dict() | {"model_type": "own"}
    model = own.OwnForCausalLM(own.OwnConfig(**settings))
    fully_shard(model)  # whose class is another module's then
    export(model, out, saved_dtypes={})
    assert getattr(model.config, "auto_map", None) is None


def test_a_models_own_code_goes_with_it(tmp_path: Path) -> None:
    code, out = tmp_path / "code", tmp_path / "out"
    code.mkdir()
    (code / "own_code.py").write_text(CODE)
    run_ranks(1, export_own_code, code, out)
    assert (out / "own_code.py").read_text() == CODE
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["OwnForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "own_code.OwnForCausalLM"


# ---- errors ----


def fail_on_first(rank: int, folder: Path, out: Path, name: str) -> None:
    model, formats = sharded(folder)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    if rank == 0:
        setattr(hf_export, name, broken)
    export(model, out, saved_dtypes=formats, max_shard_size="40KB")


@pytest.mark.parametrize("name", ["save_file", "_write_config"])
def test_a_first_rank_that_cannot_write_ends_all(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fail_on_first, folders["qwen3_moe"], tmp_path, name)
    assert sorted(failed.value.failures) == [0, 1]
    assert "OSError: no space left" in failed.value.failures[0]
    assert "exporting the model failed: OSError: no space left (rank 0)" in failed.value.failures[1]


def fail_to_convert(rank: int, folder: Path, out: Path) -> None:
    model, formats = sharded(folder)
    convert, calls = hf_export.in_checkpoint, []

    def later(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
        calls.append(next(iter(tensors.values())).is_meta)
        if calls.count(False) == 2:  # amid a file, where the ranks gather on
            raise MemoryError("no memory")
        return convert(model, tensors)

    hf_export.in_checkpoint = later
    export(model, out, saved_dtypes=formats, max_shard_size="1GB")


def test_a_first_rank_that_cannot_convert_ends_all_at_the_next_file(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fail_to_convert, folders["qwen3_moe"], tmp_path)
    assert "MemoryError: no memory" in failed.value.failures[0]
    assert "MemoryError: no memory (rank 0)" in failed.value.failures[1]
    assert not any(tmp_path.iterdir())
