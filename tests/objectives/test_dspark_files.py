"""A draft on disk: its settings and what is wrong with them, its weights in a folder of their own, and exports of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import dspark_models
import parity
import pytest
import tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.objectives.dspark import files
from torchturbo.objectives.dspark.layouts import DENSE, LAYOUTS
from torchturbo.objectives.heads import extra_heads

LAYER = [
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]
DEEPSPEC = [
    *(f"layers.{at}.{name}" for at in range(2) for name in LAYER),
    *("norm.weight", "fc.weight", "hidden_norm.weight", "embed_tokens.weight", "lm_head.weight"),
    *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    *("confidence_head.proj.weight", "confidence_head.proj.bias"),
]
"""The tensors of DeepSpec's Qwen3DSparkModel with two layers and the vanilla Markov head."""


def on() -> Any:
    return dspark_models.settings()


def draft_of(model: Any) -> dict[str, torch.Tensor]:
    found = extra_heads(model)
    assert found is not None
    return {name: parity.whole(one) for name, one in found.state_dict().items()}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target whose configuration asks for a new draft, and with one that has a draft."""
    folder = tmp_path_factory.mktemp("dspark")
    fresh = dspark_models.model()
    fresh.save_pretrained(folder / "fresh")
    tiny.tokenizer().save_pretrained(folder / "fresh")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(8))
    parity.prepared(fresh, on())
    with torch.no_grad():
        for number, parameter in enumerate(fresh.mtp.parameters()):
            parameter.fill_(0.01 * number).flatten()[0] = -1.0
    fresh.save_pretrained(folder / "drafted")
    tiny.tokenizer().save_pretrained(folder / "drafted")
    return folder


def test_an_export_has_the_draft_in_deepspecs_layout(material: Path) -> None:
    """With its copies of embeddings and head, and none of it among the target's own tensors."""
    folder = material / "drafted"
    own, draft = load_file(folder / "model.safetensors"), load_file(folder / "dspark" / "model.safetensors")

    assert sorted(DEEPSPEC) == sorted(draft)
    assert load_file(material / "fresh" / "model.safetensors").keys() == own.keys()
    for name, other in files.COPIES.items():
        assert torch.equal(own[other], draft[name])
    config = json.loads((folder / "dspark" / "config.json").read_text())
    asked = {name: config[name] for name in dspark_models.SPEC}
    assert dspark_models.SPEC == asked
    said = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "num_target_layers": 2,
    }
    assert said == {name: config[name] for name in said}
    assert ["full_attention"] * 2 == config["layer_types"]


def test_a_tied_head_is_copied_too(tmp_path: Path) -> None:
    model = dspark_models.model(tie_word_embeddings=True)
    parity.prepared(model, on())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    draft = load_file(tmp_path / "dspark" / "model.safetensors")

    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(model.lm_head.weight, draft["lm_head.weight"])
    assert torch.equal(draft["lm_head.weight"], draft["embed_tokens.weight"])


def test_a_draft_is_read_from_its_folder(material: Path) -> None:
    """Bit for bit, whatever is said in the target's own configuration; Transformers loads the target as ever."""
    model = AutoModelForCausalLM.from_pretrained(material / "drafted")
    model.config.dspark_config = {"nonsense": 1}
    parity.prepared(model, on())

    stored = load_file(material / "drafted" / "dspark" / "model.safetensors")
    found = draft_of(model)
    assert found.keys() == stored.keys() - files.COPIES.keys()
    assert all(torch.equal(stored[name], one) for name, one in found.items())


def test_a_new_draft_is_the_same_every_time(material: Path) -> None:
    """With weights as its class begins."""
    drafts = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(material / "fresh")
        parity.prepared(model, on())
        drafts.append(draft_of(model))
    assert all(torch.equal(one, drafts[1][name]) for name, one in drafts[0].items())
    assert drafts[0]["norm.weight"].eq(1).all()
    assert 0.1 < float(drafts[0]["fc.weight"].std()) < 0.3  # the target's initializer_range is 0.2


def run_all(rank: int, lines: list[list[str]]) -> list[dict[str, float]]:
    from torchturbo.train import run

    run._draw = lambda *_: None  # type: ignore[assignment]
    return [run.train(line, quiet=True).log_history[0] for line in lines]


def command(model: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(model), "--dataset", str(model.parent / "rows.jsonl"), "--output_dir", str(output),
        "--use_cpu", "--max_steps", "1", "--learning_rate", "1e-2", "--per_device_train_batch_size", "2",
        "--tt_gbs", "4", "--lr_scheduler_type", "constant", "--tt_enable_mtp", "--tt_dspark_num_anchors", "4", *words,
    ]  # fmt: skip


def test_runs_read_train_and_write_a_draft(material: Path, tmp_path: Path) -> None:
    """On two ranks, from the meta device, with a draft and without; the export is trained again, and off stays as it is."""
    one, two, off = tmp_path / "one", tmp_path / "two", tmp_path / "off"
    shutil.copy(material / "rows.jsonl", tmp_path / "rows.jsonl")
    lines = [command(material / "fresh", one), command(material / "drafted", two)]
    lines.append([*command(two, off), "--tt_enable_dspark", "false"])
    logs = run_ranks(2, run_all, lines)[0]

    stored = {
        path.name: load_file(path / "dspark" / "model.safetensors") for path in (one, two, off, material / "drafted")
    }
    assert all(sorted(DEEPSPEC) == sorted(found) for found in stored.values())
    moved = [name for name in DEEPSPEC if not torch.equal(stored["two"][name], stored["drafted"][name])]
    assert len(moved) > len(DEEPSPEC) / 2
    same = {
        name: torch.equal(stored["two"][name], stored["off"][name]) for name in DEEPSPEC if name not in files.COPIES
    }
    assert {True} == set(same.values())
    assert [True, True, False] == ["dspark_loss" in log for log in logs]
    assert [True, True, False] == ["dspark_accept_rate_3" in log for log in logs]
    target = load_file(one / "model.safetensors")
    assert torch.equal(target["model.embed_tokens.weight"], stored["one"]["embed_tokens.weight"])


# ---- refusals ----


def obstacle(model: Any) -> str:
    (problem,) = Engine(on(), Context()).problems(model)
    assert problem.key == "mtp.enabled"
    assert problem.remedy
    return problem.message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"block_size": None}, ["lacks block_size"]),
        ({"markov_head_type": None, "confidence_head_with_markov": None}, ["markov_head_type, confidence_head_with_markov"]),
        ({"block_size": 0, "markov_head_type": "gru"}, ["block_size: expected", "one of vanilla, gated, rnn, got 'gru'"]),
        ({"mask_token_id": 320}, ["a whole number from 0 to 319, the vocabulary's last, got 320"]),
        ({"target_layer_ids": [1]}, ["to 0, the last but one, got [1]"]),
        ({"target_layer_ids": [0, 0]}, ["expected ascending numbers"]),
        ({"target_layer_ids": 0}, ["expected ascending numbers", "got 0"]),
        ({"markov_rank": 0}, ["there is no Markov head"]),
        ({"hidden_size": 64, "colour": "red"}, ["hidden_size is 64, and the target's 32", "has colour"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers: expected a whole number from 1 to 2, the target's layers, got True"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_told_all_at_once(changes: dict[str, Any], told: list[str]) -> None:
    spec = {name: value for name, value in (dspark_models.SPEC | changes).items() if value is not None}
    message = obstacle(tiny.model("qwen3", dspark_config=spec))

    assert [one in message for one in ["dspark_config", *told]] == [True] * (len(told) + 1), message


def test_deepspecs_name_for_the_layers_is_known() -> None:
    spec = {name: value for name, value in dspark_models.SPEC.items() if name != "num_hidden_layers"}
    model = tiny.model("qwen3", dspark_config=spec | {"num_draft_layers": 1})
    parity.prepared(model, on())
    assert len(model.mtp.layers) == 1


def test_an_unknown_target_is_refused_by_name() -> None:
    message = obstacle(dspark_models.model("qwen3_moe"))
    assert "tried on llama, mistral, qwen2, qwen3 alone, and not on qwen3_moe" in message
    assert ["llama", "mistral", "qwen2", "qwen3"] == [layout.model_type for layout in LAYOUTS if layout.find == DENSE]


def broken(folder: Path, kind: str) -> None:
    """Break a draft's folder."""
    weights, config = folder / "dspark" / "model.safetensors", folder / "dspark" / "config.json"
    tensors, said = load_file(weights), json.loads(config.read_text())
    if kind == "gone":
        weights.unlink()
    if kind == "lacking":
        save_file({name: one for name, one in tensors.items() if "k_proj" not in name}, weights)
    if kind == "other":
        save_file(tensors | {"norm.weight": torch.ones(5), "extra": torch.ones(1)}, weights)
    if kind == "gemma":
        config.write_text(json.dumps(said | {"model_type": "gemma4"}))
    if kind == "no json":
        config.write_text("{")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gone", "has no model.safetensors beside its config.json"),
        ("lacking", "lack 2 of 29: layers.0.self_attn.k_proj.weight, layers.1.self_attn.k_proj.weight"),
        ("other", "have extra, which its config.json does not ask for; its weights have norm.weight as [5]"),
        ("gemma", "is of model_type gemma4, and only qwen3 drafts are known"),
        ("no json", "dspark/config.json can't be read"),
    ],
)
def test_a_broken_draft_is_refused_before_weights_are_read(
    kind: str, told: str, material: Path, tmp_path: Path
) -> None:
    shutil.copytree(material / "drafted", tmp_path / "model")
    broken(tmp_path / "model", kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="meta")

    assert told in obstacle(model)


def test_a_model_without_dspark_fields_has_none() -> None:
    from torchturbo.objectives.dspark.layouts import find

    assert find(tiny.model("qwen3"), None) is None
    assert find(tiny.model("mixtral"), None) is None
