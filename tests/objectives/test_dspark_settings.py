"""Settings and folders of drafts that no draft can be made of: each is told by its name, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspark_models
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from torchturbo.objectives.dspark import files
from torchturbo.objectives.dspark.dense import find

NO_TENSORS = (8).to_bytes(8, "little") + b"{}      "


def target(**changes: Any) -> Any:
    with torch.device("meta"):
        return tiny.model("qwen3", **changes)


def refusal(model: Any) -> str:
    """Return why a model gets no draft."""
    planned = find(model, None)
    assert planned is not None
    assert planned.build is None
    assert planned.remedy
    return planned.obstacle


# ---- values ----


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("markov_head_type", ["vanilla"], "expected one of vanilla, gated, rnn, got ['vanilla']"),
        ("num_attention_heads", 0, "expected a whole number of at least 1, got 0"),
        ("num_attention_heads", "4", "expected a whole number of at least 1, got '4'"),
        ("num_key_value_heads", 3, "expected a divisor of num_attention_heads, 4, got 3"),
        ("num_key_value_heads", 0, "expected a whole number of at least 1, got 0"),
        ("hidden_act", "nope", "expected one of gelu"),
        ("hidden_act", ["silu"], "got ['silu']"),
        ("intermediate_size", -4, "expected a whole number of at least 1, got -4"),
        ("head_dim", "x", "expected a whole number of at least 2, got 'x'"),
        ("head_dim", 5, "expected an even number, whose halves turn together, got 5"),
        ("rms_norm_eps", "a", "expected a number above 0 and below 1, got 'a'"),
        ("rms_norm_eps", 0, "expected a number above 0 and below 1, got 0"),
        ("rms_norm_eps", float("nan"), "expected a number above 0 and below 1, got nan"),
        ("attention_dropout", 1.5, "expected a number of at least 0 and below 1, got 1.5"),
        ("rope_parameters", "x", "expected a mapping, got 'x'"),
        ("attention_bias", "no", "expected true or false, got 'no'"),
        ("hidden_size", 32.0, "is 32.0, and the target's 32"),
        ("block_size", 100000, "from 1 to 128, the target's max_position_embeddings, got 100000"),
        ("block_size", 10**9, "from 1 to 128, the target's max_position_embeddings, got 1000000000"),
        ("block_size", True, "got True"),
        ("num_hidden_layers", 10_000_000, "expected a whole number from 1 to 2, the target's layers, got 10000000"),
        ("num_hidden_layers", None, "got None"),
        ("markov_rank", "6", "expected a whole number from 0 to 320, the vocabulary, got '6'"),
        ("markov_rank", 10**12, "the vocabulary, got 1000000000000"),
        ("enable_confidence_head", "no", "expected true or false, got 'no'"),
        ("confidence_head_with_markov", 1, "expected true or false, got 1"),
        ("target_layer_ids", ["0"], "expected ascending numbers of layers from -1, the embeddings, to 0"),
        ("target_layer_ids", {"0": 0}, "got {'0': 0}"),
        ("mask_token_id", [], "expected a whole number from 0 to 319, the vocabulary's last, got []"),
    ],
)  # fmt: skip
def test_a_value_that_no_draft_can_have_is_told(name: str, value: Any, told: str) -> None:
    message = refusal(target(dspark_config=dspark_models.SPEC | {name: value}))

    separator = "" if name == "hidden_size" else ":"
    assert message.startswith(f"{name}{separator} ")
    assert told in message
    assert ";" not in message


def test_all_wrong_values_are_told_at_once() -> None:
    wrong = {"block_size": "7", "head_dim": None, "hidden_act": 1, "num_key_value_heads": 3, "markov_head_type": {}}
    message = refusal(target(dspark_config=dspark_models.SPEC | wrong))

    assert sorted(wrong) == sorted(part.split(":")[0] for part in message.split("; "))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": {"rope_type": "nope"}}, "nope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, "Transformers says"),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "linear",
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "turn 4 of the 8",
        ),
        ({"initializer_range": "a"}, "initializer_range"),
        ({"pad_token_id": "a"}, "pad_token_id"),
        ({"intermediate_size": 10**30}, "Transformers says"),
    ],
    ids=["kind of rope", "base of rope", "half of rope", "spread", "pad", "beyond torch"],
)
def test_what_transformers_has_against_settings_is_told(changes: dict[str, Any], told: str) -> None:
    message = refusal(target(dspark_config=dspark_models.SPEC | changes))

    assert "expected settings of a Qwen3 model, and Transformers says" in message
    assert told in message


@pytest.mark.parametrize("changes", [{"intermediate_size": 10**9}, {"num_attention_heads": 10**6}])
def test_a_new_draft_is_no_larger_than_its_target(changes: dict[str, Any]) -> None:
    model = target(dspark_config=dspark_models.SPEC | changes)
    own = sum(parameter.numel() for parameter in model.parameters())

    assert f"parameters, expected at most the target's {own:,}" in refusal(model)


def test_a_block_is_bounded_where_positions_are_not() -> None:
    message = refusal(target(dspark_config=dspark_models.SPEC | {"block_size": 4096}, max_position_embeddings=10**6))
    assert "block_size: expected a whole number from 1 to 1024, got 4096" == message


@pytest.mark.parametrize("said", [[1, 2], "x", 3, []], ids=["list", "text", "number", "empty"])
def test_settings_that_are_no_mapping_are_told(said: Any) -> None:
    model = target()
    model.config.dspark_config = said

    assert f"dspark_config: expected a mapping of names to values, got {said!r}" == refusal(model)


# ---- folders ----


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target's folder with a draft in ``dspark/``."""
    from torchturbo.objectives.dspark.draft import DenseDraft
    from torchturbo.objectives.dspark.settings import draft_config

    folder = tmp_path_factory.mktemp("target")
    model = dspark_models.model()
    model.save_pretrained(folder)
    found = files.find(model)
    assert found is not None
    config = draft_config(model.config, found)
    files.write(folder, config, DenseDraft(config).state_dict())
    return folder


@pytest.fixture
def copied(draft: Path, tmp_path: Path) -> Path:
    """Return the folder of the draft of a copy."""
    inside = tmp_path / "model" / "dspark"
    inside.mkdir(parents=True)
    for file in (draft / "dspark").iterdir():
        (inside / file.name).write_bytes(file.read_bytes())
    return inside


def of(inside: Path) -> Any:
    """Return the target of a draft's folder, as if it were loaded."""
    model = target()
    model.config._name_or_path = str(inside.parent)
    return model


def test_a_whole_folder_has_a_draft(copied: Path) -> None:
    """By one file or by several that an index names, and there is nothing to bound where files say all."""
    planned = find(of(copied), None)
    assert planned is not None
    assert planned.build is not None

    tensors = load_file(copied / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, copied / file)
    (copied / "model.safetensors").unlink()
    index(copied, {name: file for file, part in parts.items() for name in part})
    planned = find(of(copied), None)
    assert planned is not None
    assert planned.build is not None
    assert sorted(parts) == [path.name for path in planned.build(of(copied)).files]


def index(inside: Path, names: Any) -> None:
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1,2]", "dspark/config.json: expected a mapping of names to values, got [1, 2]"),
        ("null", "dspark/config.json: expected a mapping of names to values, got None"),
        ("[" * 200_000, "dspark/config.json can't be read: maximum recursion depth"),
        ('{"block_size": 1' + "0" * 5000 + "}", "dspark/config.json can't be read"),
        ("\xff", "dspark/config.json can't be read"),
    ],
    ids=["list", "null", "deep", "long", "latin"],
)
def test_a_damaged_config_is_told(text: str, told: str, copied: Path) -> None:
    (copied / "config.json").write_text(text, encoding="latin-1")
    assert told in refusal(of(copied))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "dspark/model.safetensors is damaged"),
        (b"\xff" * 100, "dspark/model.safetensors is damaged"),
        (b"PK\x03\x04" + bytes(100), "dspark/model.safetensors is damaged"),
        (NO_TENSORS, "has no model.safetensors beside its config.json"),
    ],
    ids=["empty", "ones", "zip", "no tensors"],
)
def test_damaged_weights_are_told(content: bytes, told: str, copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(content)
    assert told in refusal(of(copied))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "index.json: expected a mapping weight_map of tensors to files, got []"),
        ("{", "index.json can't be read"),
        ("[" * 200_000, "index.json can't be read"),
        ('{"weight_map": [1]}', "index.json: expected a mapping weight_map of tensors to files"),
        ('{"weight_map": {"a": 3}}', "index.json names 3, which is no file of this folder"),
        ('{"weight_map": {"a": ["x"]}}', "index.json names ['x'], which is no file of this folder"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names '../model.safetensors', which is no file of this"),
        ('{"weight_map": {"a": "/etc/hostname"}}', "names '/etc/hostname', which is no file of this folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "index.json names gone.safetensors, which is missing"),
        ('{"weight_map": {"a": "config.json"}}', "dspark/config.json is damaged"),
    ],
    ids=["list", "cut off", "deep", "no map", "number", "nested", "above", "absolute", "gone", "other"],
)
def test_a_damaged_index_is_told_and_nothing_outside_is_opened(
    text: str, told: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "model.safetensors").rename(copied.parent / "model.safetensors")
    (copied / "model.safetensors.index.json").write_text(text)
    opened: list[Path] = []
    known: Callable[[Path], str | None] = files.safetensors_problem

    def problem(path: Path) -> str | None:
        opened.append(path)
        return known(path)

    monkeypatch.setattr(files, "safetensors_problem", problem)

    assert told in refusal(of(copied))
    assert [] == [path for path in opened if path.resolve().parent != copied.resolve()]


@pytest.mark.parametrize("layers", [10_000_000, 1, 3])
def test_layers_are_counted_in_the_files_before_any_is_built(layers: int, copied: Path) -> None:
    said = json.loads((copied / "config.json").read_text()) | {"num_hidden_layers": layers, "hidden_act": "nope"}
    (copied / "config.json").write_text(json.dumps(said))

    message = refusal(of(copied))
    assert "hidden_act: expected one of" in message
    assert f"its weights are those of 2 layers, and its config.json asks for num_hidden_layers {layers}" in message
