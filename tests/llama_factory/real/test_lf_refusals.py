"""What is refused with the real package: names and values against its dataclasses, its own messages, quantised models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchturbo.errors import ConfigError


def refused(engine: Any, error_lines: Callable[[], list[str]], *words: Any) -> list[str]:
    error_lines()
    with pytest.raises(ConfigError) as caught:
        engine(*words)
    assert caught.value.code == 2
    return error_lines()


def test_unknown_names_and_text_in_place_of_numbers(
    settings: Callable[..., Path], engine: Any, error_lines: Callable[[], list[str]]
) -> None:
    """All at once, with place and remedy; LLaMA-Factory takes ``bf16: "False"`` for on."""
    path = settings(learning_rate="0.0001", evaluation_strategy="no")
    found = refused(engine, error_lines, path, "max_step=3", 'bf16="False"', "seed=")

    assert 5 == len(found)
    for begins, holds in (
        (f"{path}:", 'learning_rate: expected a number, got string "0.0001"; write it without quotes'),
        (f"{path}:", "evaluation_strategy: LLaMA-Factory has no such argument; it is eval_strategy now"),
        ("max_step=3: ", "LLaMA-Factory has no such argument; did you mean max_steps or save_steps?"),
        ('bf16="False": ', 'expected true or false, got string "False"; write it without quotes'),
        ("seed=: ", "expected a value, got nothing; remove the key"),
    ):
        assert [line for line in found if line.startswith(begins) and line.endswith(holds)], (holds, found)


def test_flags_have_their_whole_names(engine: Any, error_lines: Callable[[], list[str]]) -> None:
    """LLaMA-Factory would take an abbreviation, and print the help of every argument for a bad value."""
    words = ["--do_train", "--stage", "sft", "--model_name_or_path", "m"]
    assert ["--learning_r: LLaMA-Factory has no such argument; did you mean learning_rate?"] == refused(
        engine, error_lines, *words, "--learning_r", "1e-4"
    )
    assert ["--max_steps: invalid int value: 'many'"] == refused(engine, error_lines, *words, "--max_steps", "many")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dataset=nothing"], "Undefined dataset nothing"),
        (["template=nothing"], "Template nothing does not exist"),
        (["model_name_or_path=nowhere"], "Failed to load tokenizer"),
        (["stage=pt", "mask_history=true"], "cannot be set as True except SFT"),
        (["use_dora=true"], "`use_dora` is only valid for LoRA training"),
    ],
)
def test_its_own_messages_are_problems(
    words: list[str], said: str, settings: Callable[..., Path], engine: Any, error_lines: Callable[[], list[str]]
) -> None:
    """One line that says whose it is, status 2."""
    (line,) = refused(engine, error_lines, settings(), *words)
    assert line.startswith("LLaMA-Factory: ") and said in line


def test_a_model_whose_folder_says_that_it_is_quantised(
    settings: Callable[..., Path], engine: Any, material: Path, tmp_path: Path, error_lines: Callable[[], list[str]]
) -> None:
    """Before a weight is read: there is none."""
    shutil.copytree(material / "model", tmp_path / "quantised", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(config))

    (line,) = refused(
        engine, error_lines, settings(), f"model_name_or_path={tmp_path / 'quantised'}", "finetuning_type=lora"
    )
    assert "the model is quantised" in line
