"""The objectives' guides and examples: their first commands run as they stand there, and what they are about is learned."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

from torchturbo.train.run import TrainResult, train

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
OBSERVING = (GUIDES / "observing.md").read_text("utf-8").partition("{ #metrics }")[2].partition("\n## ")[0]
SHORT = ["--use_cpu", "--save_strategy", "no", "--report_to", "none"]


class Guide(NamedTuple):
    """What a guide's first commands are run with, and what has to come of it."""

    name: str
    words: list[str]
    """What is added: fewer steps, and what a machine with one process can do."""
    falls: dict[str, float]
    """Metrics that fall, each from its first log to the last, to less than this part of it."""
    rises: dict[str, float] = {}
    """Metrics that rise, to more than this many times the first."""


FAST = ["--logging_steps", "4", "--per_device_train_batch_size", "4", "--learning_rate", "1e-2"]
RUNS = (
    Guide("multi-token-prediction", [*FAST, "--max_steps", "24"], {"mtp_1_loss": 0.8}),
    Guide(
        "dspark",
        [*FAST, "--max_steps", "24"],
        {"dspark_loss": 0.8, "dspark_confidence_error": 0.7},
        {"dspark_accepted_length": 1.2},
    ),
    Guide("router-losses", [*FAST, "--max_steps", "24"], {"moe_z_loss": 0.7, "moe_aux_loss": 0.85, "loss": 0.9}),
    Guide("block-diffusion", [*FAST, "--max_steps", "48"], {"loss": 0.7}),
)
METRICS = {
    "multi-token-prediction": {"mtp_1_loss"},
    "dspark": {
        "dspark_loss",
        *(f"dspark_accept_rate_{slot}" for slot in (1, 2, 3, 4)),
        "dspark_accepted_length",
        "dspark_confidence_error",
    },
    "router-losses": {"moe_aux_loss", "moe_z_loss"},
    "block-diffusion": {"cap_loss"},
}
"""What each guide says is logged."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder that has the examples."""
    made = tmp_path_factory.mktemp("guides")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture(scope="module")
def results() -> dict[str, TrainResult]:
    return {}


def commands(guide: str) -> list[list[str]]:
    """Return the words of the commands in a guide's first block."""
    text = (GUIDES / f"{guide}.md").read_text("utf-8")
    block = re.findall(r"^```sh\n(.*?)^```$", text, re.S | re.M)[0]
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def run(guide: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> TrainResult:
    """Run the commands of a guide's first block in the folder that is the current one, and return the last run's result."""
    made, *trained = commands(guide)
    assert ["python", "examples/make_model.py"] == made[:2]
    monkeypatch.setattr(sys, "argv", made[1:])
    runpy.run_path(str(ROOT / made[1]), run_name="__main__")
    result: Any = None
    for command in trained:
        assert ["torchturbo", "train"] == command[:2]
        result = train([*command[2:], *words, *SHORT])
    return result  # type: ignore[no-any-return]


def series(result: TrainResult, name: str) -> list[float]:
    return [entry[name] for entry in result.log_history if name in entry]


@pytest.mark.parametrize("guide", RUNS, ids=lambda guide: guide.name)
def test_a_guide_s_first_commands_train(
    guide: Guide, folder: Path, results: dict[str, TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics that it names are logged, and what the objective is about gets better."""
    monkeypatch.chdir(folder)
    result = results[guide.name] = run(guide.name, guide.words, monkeypatch)
    logged: set[str] = set().union(*result.log_history)
    assert METRICS[guide.name] == {name for name in logged if name.startswith(("mtp_", "dspark_", "moe_", "cap_"))}
    for name, part in guide.falls.items():
        values = series(result, name)
        assert values[-1] < part * values[0], (name, values)
    for name, times in guide.rises.items():
        values = series(result, name)
        assert values[-1] > times * values[0], (name, values)
    text = (GUIDES / f"{guide.name}.md").read_text("utf-8").partition("## What is logged")[2].partition("\n## ")[0]
    assert {name for name in METRICS[guide.name] if not re.search(r"_[234]$", name)} <= set(
        re.findall(r"`(\w+)`", text)
    )


def test_the_export_has_the_heads_under_their_own_names(folder: Path, results: dict[str, TrainResult]) -> None:
    """As a serving engine looks for them."""
    found = results["multi-token-prediction"].output_dir
    names = set(safe_open(folder / found / "model.safetensors", "pt").keys())
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"} <= names
    assert 1 == json.loads((folder / found / "config.json").read_text("utf-8"))["num_nextn_predict_layers"]


def test_the_export_has_the_draft_beside_the_model(folder: Path, results: dict[str, TrainResult]) -> None:
    found = folder / results["dspark"].output_dir / "dspark"
    names = set(safe_open(found / "model.safetensors", "pt").keys())
    assert {"fc.weight", "markov_head.markov_w1.weight", "embed_tokens.weight", "lm_head.weight"} <= names
    assert ["Qwen3DSparkModel"] == json.loads((found / "config.json").read_text("utf-8"))["architectures"]


def test_the_program_that_decodes(
    folder: Path, results: dict[str, TrainResult], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's own, on the model that its commands have trained."""
    assert "block-diffusion" in results
    monkeypatch.chdir(folder)
    assert 1 == written(capsys).count("\n")  # the answer of a model that has learned for a moment


def written(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the program of the guide on block diffusion prints in the folder that is the current one."""
    text = (GUIDES / "block-diffusion.md").read_text("utf-8")
    (program,) = re.findall(r'^```python title="write.py"\n(.*?)^```$', text, re.S | re.M)
    capsys.readouterr()
    exec(compile(program, "write.py", "exec"), {})
    return capsys.readouterr().out


@pytest.mark.full
def test_the_diffusion_model_writes_what_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All epochs of the guide's commands, which take a minute."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    run("block-diffusion", [], monkeypatch)
    assert " saves nine.\n" == written(capsys)


@pytest.mark.parametrize(
    ("name", "kind", "data"),
    [("experts.yaml", "experts", "fables.txt")],
)
def test_an_example_that_no_guide_runs(
    name: str, kind: str, data: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what needs more ranks set to one."""
    monkeypatch.chdir(folder)
    words = ["--tt_config", f"examples/{name}", "--tt_ep_size", "1", "--model_name_or_path", f"runs/tiny-{kind}"]
    words += [
        "--dataset",
        f"examples/data/{data}",
        "--output_dir",
        f"runs/{name}",
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
    ]
    result: Any = train([*words, *SHORT])
    assert 2 == len(series(result, "moe_aux_loss")) == len(series(result, "moe_z_loss"))
