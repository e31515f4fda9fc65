"""From words to LLaMA-Factory's arguments: every way in which people write them, and what is wrong with the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from torchturbo.adapters.llama_factory.said import read_arguments

FILE = {"model_name_or_path": "m", "do_train": True, "learning_rate": 0.1, "output_dir": "out"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    text = "model_name_or_path: m\ndo_train: true  # yes\nlearning_rate: 1e-1\noutput_dir: out\n"
    for name in ("train.yaml", "train.yml", "My Train.YAML"):
        Path(name).write_text(text)
    Path("train.json").write_text("\ufeff" + json.dumps(FILE), encoding="utf-8")
    Path("second.yaml").write_text("")


def values(*words: str) -> Any:
    read = read_arguments(words)
    assert [] == read.problems
    return read.for_framework


def problems(*words: str) -> list[str]:
    return [str(problem) for problem in read_arguments(words).problems]


@pytest.mark.parametrize("name", ["train.yaml", "train.yml", "My Train.YAML", "train.json"])
def test_a_file_of_any_kind(name: str) -> None:
    """LLaMA-Factory's own reading of JSON files fails."""
    assert FILE == values(name)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["learning_rate=5e-5"], {"learning_rate": 5e-5}),
        (["--learning_rate=5e-5"], {"learning_rate": 5e-5}),
        (["--learning-rate", "5e-5"], {"learning_rate": 5e-5}),
        (["--learning_rate", "-5e-5"], {"learning_rate": -5e-5}),
        (["learning_rate=1", "learning_rate=2"], {"learning_rate": 2}),
        (["bf16=yes"], {"bf16": True}),
        (["bf16=off"], {"bf16": False}),
        (["--bf16"], {"bf16": True}),
        (["--bf16", "--do_eval"], {"bf16": True, "do_eval": True}),
        (["--bf16", "max_steps=3"], {"bf16": True, "max_steps": 3}),
        (["--bf16", "false"], {"bf16": False}),
        (["run_name=my run"], {"run_name": "my run"}),
        (["--run_name", "my run"], {"run_name": "my run"}),
        (["--run_name=a=b"], {"run_name": "a=b"}),
        (["lr_scheduler_kwargs.min_lr=1e-6"], {"lr_scheduler_kwargs": {"min_lr": 1e-6}}),
        (["output_dir=runs/${model_name_or_path}"], {"output_dir": "runs/m"}),
        (["--", "max_steps=3"], {"max_steps": 3}),
        (["seed="], {"seed": None}),
    ],
)
@pytest.mark.parametrize("name", ["train.yaml", "train.json"])
def test_overrides(words: list[str], changed: dict[str, Any], name: str) -> None:
    """Beside a file they may have dashes, which LLaMA-Factory refuses; before it, too."""
    assert FILE | changed == values(name, *words)
    if words != ["--", "max_steps=3"] and not (words[0].startswith("--") and "=" not in words[-1]):
        assert FILE | changed == values(*words, name)


@pytest.mark.parametrize("flag", ["--local_rank=0", "--local-rank=0"])
def test_what_a_launcher_puts_before_the_file(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is in the variable."""
    assert FILE == values(flag, "train.yaml")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert FILE == values(flag, "train.yaml")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert FILE | {"local_rank": 0} == values(flag, "train.yaml")


def test_flags_alone_go_on_as_they_are() -> None:
    """A file behind a flag is its value."""
    words = [
        "--stage",
        "dpo",
        "--bf16",
        "--deepspeed",
        "ds.json",
        "--lr=1e-5",
        "--report_to",
        "a",
        "b",
        "--num-x",
        "-3",
    ]
    read = read_arguments(words)

    assert (words, []) == (read.for_framework, read.problems)
    assert {
        "stage": "dpo", "bf16": True, "deepspeed": "ds.json", "lr": 1e-5, "report_to": ["a", "b"], "num_x": -3,
    } == {name: said.value for name, said in read.said.items()}  # fmt: skip
    assert "--num-x" == read.said["num_x"].place


@pytest.mark.parametrize("word", ["yes", "True", "t", "1"])
def test_switches_as_flags(word: str) -> None:
    """The words that Transformers' parser takes for true."""
    assert read_arguments(["--bf16", word]).said["bf16"].value in (True, 1)


def test_places() -> None:
    """The line and column of a file's value; the word of any other."""
    Path("train.yaml").write_text("# mine\nbf16:   true\nrun_name: a\nseed: 1\n")
    said = read_arguments(["train.yaml", "run_name=b", "--seed", "2"]).said

    assert {"bf16": "train.yaml:2:9: bf16", "run_name": "run_name=b", "seed": "--seed"} == {
        name: one.place for name, one in said.items()
    }


def test_environment_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory alone would hand on the text ``${oc.env:...}``."""
    monkeypatch.setenv("WHO", "me")
    Path("train.yaml").write_text("run_name: ${oc.env:WHO}\noutput_dir: ${oc.env:WHERE}\n")

    (line,) = problems("train.yaml")
    assert line.startswith("train.yaml:2:13: output_dir: ") and "WHERE" in line
    assert {"run_name": "me"} == read_arguments(["train.yaml"]).for_framework


@pytest.mark.parametrize("value", ["runs/${oc.env:WHO}", "{a: '${oc.env:WHO}'}", "[x, '${oc.env:WHO}']"])
def test_what_was_filled_in_is_not_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a variable that nobody else is to see."""
    monkeypatch.setenv("WHO", "s3cr3t")
    Path("train.yaml").write_text(f"run_name: {value}\nstage: $5\n")
    said = read_arguments(["train.yaml", "seed=${oc.env:WHO}"]).said

    assert ["its value", "the stage $5", "its value"] == [one.told("the stage {}") for one in said.values()]
    assert "s3cr3t" in str(said["run_name"].value)


@pytest.mark.parametrize("value", ["${oc.decode:${oc.env:WHO}}", "${${oc.env:WHO}}", "a/${oc.env:${oc.env:WHO}}"])
def test_nor_by_omegaconf(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages hold what it could not read."""
    monkeypatch.setenv("WHO", "[s3cr3t")
    Path("train.yaml").write_text(f"seed: {value}\n")
    assert ["train.yaml:1:7: seed: a ${...} in its value can't be filled in"] == problems("train.yaml")


@pytest.mark.parametrize("name", ["hf_hub_token", "hub_tokne_secret", "API_KEY", "password"])
def test_secrets_are_not_told(name: str) -> None:
    """The place of a word is its name then."""
    said = read_arguments(["train.yaml", f"{name}=s3cr3t"]).said
    assert (f"{name}=...", "s3cr3t") == (said[name].place, said[name].value)


FILES = {
    "train.yaml": "# mine\nstage: dpo\nuse_muon: true\nquantization_bit: null\naccelerator_config: {split_batches: true}\n",
    "train.json": json.dumps(
        {"stage": "dpo", "use_muon": True, "quantization_bit": None, "accelerator_config": {"split_batches": True}}
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_omegaconf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which comes with LLaMA-Factory: what is wrong is told all the same."""
    Path(name).write_text(FILES[name])
    with_it = read_arguments([name, "do_train=true", "--seed", "3"])
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    monkeypatch.setattr("torchturbo.adapters.llama_factory.said.find_spec", lambda name: None)

    assert with_it == read_arguments([name, "do_train=true", "--seed", "3"])
    assert 3 == len(problems(name, "foo", "bar") + problems("none.yaml"))
    assert {} == read_arguments([name, "stage=${oc.env:STAGE}"]).said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.yaml", "foo"], "foo: expected key=value; quote values with blanks: 'run_name=my run'"),
        (["train", "train.yaml"], "train: unexpected word; leave it out: this command only trains"),
        (["train.yaml", "second.yaml"], "second.yaml: a second file; name one; a TorchTurbo"),
        (["none.yaml"], "none.yaml: no such file"),
        ([], "no arguments of LLaMA-Factory; name its file: torchturbo llamafactory train.yaml"),
        (["train.yaml", "x={a"], "x={a: while parsing a flow mapping"),
    ],
)
def test_words_that_are_neither(words: list[str], expected: str) -> None:
    """One line each."""
    (line,) = problems(*words)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("bad.yaml", "a: 1\na: 2\n", "bad.yaml:2:1: a"),
        ("bad.yaml", "a: [1\n", "bad.yaml:"),
        ("bad.yaml", "- a\n", "bad.yaml:1:1: expected a mapping of arguments"),
        ("bad.json", '{"a": 1,}', "bad.json:1:"),
        ("bad.json", '{"a": 1, "a": 2}', "bad.json:1:10: a"),
    ],
)
def test_files_that_are_broken(name: str, text: str, expected: str) -> None:
    """With their line and column."""
    Path(name).write_text(text)
    assert problems(name)[0].startswith(expected)


def test_problems_of_words_and_file_together() -> None:
    """All at once."""
    Path("bad.yaml").write_text("a: 1\na: 2\n")
    assert 3 == len(problems("bad.yaml", "foo", "x={a"))
