"""What a checkpoint's headers show to be wrong, conversions, ties, formats, and where the files are found."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.checkpoint import families
from tests.ranks import run_ranks
from torchturbo.checkpoint.slices import Converted, Reader
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.errors import ConfigError

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a checkpoint in one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    tiny.model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    tiny.model("llama", tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def empty(kind: str = "qwen3_moe", **changes: Any) -> Any:
    with torch.device("meta"):
        return tiny.model(kind, **changes)


# ---- what is wrong ----


def test_everything_wrong_is_told_at_once_and_before_a_tensor_is_read(
    moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.input_layernorm.weight"], tensors[EXPERT]
        del tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:7].clone()
        tensors["odd"] = torch.zeros(2)

    rewrite(moe, change)
    monkeypatch.setattr(Reader, "read", None)
    with pytest.raises(ConfigError) as raised:
        WeightSource.find(str(moe)).load(empty())
    file = moe / "model.safetensors"
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        f"{moe}: lacks 2 of the model's weights: model.layers.1.input_layernorm.weight, model.norm.weight; "
        "use the whole model, as save_pretrained writes it"
    )
    assert lines[1].startswith(f"{moe}: can't be converted to the model's model.layers.1.mlp.experts.gate_up_proj: ")
    remedy = "use the config.json that belongs to these weights"
    assert lines[2:] == [
        f"{file}: holds lm_head.weight as [7, 32], the model expects [320, 32]; {remedy}",
        f"{file}: holds model.layers.0.mlp.experts.down_proj as [3, 32, 24], the model expects [4, 32, 24]; {remedy}",
    ]


def test_a_format_that_torch_has_not_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    tiny.model().config.save_pretrained(tmp_path)
    messages = [str(problem) for problem in WeightSource.find(str(tmp_path)).problems(empty("llama"))]
    assert messages[-1] == f"{tmp_path / 'model.safetensors'}: holds model.norm.weight in a format that torch has not"


def test_tensors_that_the_model_has_no_place_for_are_left_out(moe: Path) -> None:
    rewrite(moe, lambda tensors: tensors.update(extra=torch.zeros(2)))
    source, model = WeightSource.find(str(moe)), empty()
    assert source.problems(model) == []
    assert source.recipes(model).unexpected == ["extra"]


def test_adapters_on_a_model_without_weights_are_refused(tied: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(families.empty(tied), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as raised:
        WeightSource.find(str(tied)).load(model)
    assert str(raised.value) == (
        f"{tied}: can't be read into a model that got adapters while it had no weights; "
        "read the weights with from_pretrained before it gets them"
    )


# ---- ties ----


def embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.model.embed_tokens.weight, model.lm_head.weight


def head_too(change: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + change})


@pytest.mark.parametrize(
    "change",
    [
        head_too(0.0),
        head_too(1.0),
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}),
    ],
    ids=["both, equal", "both, different", "the head alone"],
)
def test_what_the_files_hold_of_a_tied_pair_decides_as_in_from_pretrained(
    tied: Path, change: Callable[[Tensors], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("torchturbo.checkpoint.weights.COMPARED_ROWS", 100)  # 320 rows: several stretches
    rewrite(tied, change)
    reference = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    model, source = families.empty(tied), WeightSource.find(str(tied))
    source.tie(model)
    source.load(model)
    (first, second), (one, other) = embeddings(model), embeddings(reference)
    assert (first is second) == (one is other)
    assert model.all_tied_weights_keys == reference.all_tied_weights_keys
    assert families.differences(model, reference) == []


# ---- conversions ----


def load_converted(rank: int, folder: Path) -> tuple[list[str], set[str]]:
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, PermuteForRope, Transpose, WeightConverter, WeightRenaming

    projections = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    mapping = [
        WeightRenaming("mlp.down_mixed", "mlp.down"),
        WeightRenaming("model.norm", "model.final_norm"),  # the model has none of that name: the file's own is right
        WeightConverter("self_attn.qkv.weight", projections, [Chunk(dim=0)]),
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(dim0=0, dim1=1)]),
        WeightConverter("self_attn.o_mixed.weight", "self_attn.o_proj.weight", [PermuteForRope()]),
    ]
    register_checkpoint_conversion_mapping("llama", mapping, overwrite=True)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = families.empty(folder)
    families.shard(model)
    source = WeightSource.find(str(folder))
    source.load(model)
    sources = source.recipes(model).sources
    whole = {name for name, one in sources.items() if isinstance(one, Converted)}
    return families.differences(model, reference), whole


def test_other_conversions_are_transformers_own(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for layer in ("model.layers.0.", "model.layers.1."):
            parts = [tensors.pop(f"{layer}self_attn.{name}_proj.weight") for name in "qkv"]
            tensors[f"{layer}self_attn.qkv.weight"] = torch.cat(parts)
            tensors[f"{layer}self_attn.o_mixed.weight"] = tensors.pop(f"{layer}self_attn.o_proj.weight")
            tensors[f"{layer}mlp.down_mixed.weight"] = tensors.pop(f"{layer}mlp.down_proj.weight").T.contiguous()

    tiny.model("llama", num_key_value_heads=4).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    for differences, whole in run_ranks(2, load_converted, tmp_path):
        assert differences == []
        assert whole == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)}  # it computes


# ---- formats ----


def test_formats_are_each_tensors_own(moe: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        tensors[EXPERT] = tensors[EXPERT].half()  # one of four: the first one's counts

    rewrite(moe, change)
    model = empty()
    formats = WeightSource.find(str(moe)).dtypes(model)
    assert formats.keys() == dict(model.named_parameters()).keys()
    assert formats.pop("model.norm.weight") == torch.float32
    assert set(formats.values()) == {torch.bfloat16}


def test_formats_without_headers_are_the_configurations(tmp_path: Path) -> None:
    tiny.model("llama", tie_word_embeddings=True).config.save_pretrained(tmp_path)
    source = WeightSource.find(str(tmp_path), dtype=torch.float16)
    assert source.files == ()
    formats = source.dtypes(empty("llama", tie_word_embeddings=True))
    assert set(formats.values()) == {torch.float16}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= formats.keys()
    assert WeightSource.find(str(tmp_path)).dtypes(empty("llama")) == {}


def test_tied_parameters_have_the_format_under_each_name(tied: Path) -> None:
    formats = WeightSource.find(str(tied)).dtypes(families.empty(tied))
    assert formats["lm_head.weight"] == formats["model.embed_tokens.weight"] == torch.bfloat16


# ---- where the files are ----


def test_a_name_on_the_hub_is_asked_for_its_files_in_the_revision(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, Any]] = []

    def cached_file(name: str, file: str, *, revision: str | None, **settings: Any) -> str | None:
        asked.append((name, file, revision))
        assert settings == {"_raise_exceptions_for_missing_entries": False}
        return str(moe / file) if (moe / file).exists() else None

    monkeypatch.setattr("torchturbo.checkpoint.weights.cached_file", cached_file)
    source = WeightSource.find("owner/model", revision="v2")
    assert source.files == (moe / "model.safetensors",)
    assert asked == [("owner/model", "model.safetensors", "v2")]


def test_files_of_an_index_are_found(tmp_path: Path) -> None:
    families.save(tmp_path, "tied")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    source = WeightSource.find(str(tmp_path))
    assert set(source.files) == {tmp_path / name for name in index["weight_map"].values()}
    assert source.stored.keys() == index["weight_map"].keys()
