"""All five steps with a model of 40 kB: real conversion, real training, real generation, in seconds."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from torchturbo.engine.config import load_config
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS
from torchturbo.quickstart import run as module
from torchturbo.quickstart.command import Options
from torchturbo.quickstart.console import Console
from torchturbo.quickstart.errors import Interrupted, QuickstartError
from torchturbo.quickstart.output import RECORD
from torchturbo.quickstart.run import quickstart

PRINTED = re.compile(r"^    (torchturbo (?:.*\\\n)*.*)$", re.MULTILINE)
"""A command over one or more lines."""


@pytest.fixture
def place(tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and a cache that holds the small model's wheel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    tiny.install(tmp_path / "xdg" / "torchturbo")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def run(tiny, folder: str = "out", steps: int = 3, seed: int = 0) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    quickstart(Options(Path(folder), steps, seed), Console(stream), tiny.source)
    stream.flush()
    return stream.buffer.getvalue().decode()


def test_the_whole_run(place: Path, tiny) -> None:
    text = run(tiny, steps=30)
    out = place / "out"

    record = json.loads((out / RECORD).read_text())
    assert record["finished"] is True
    assert len(record["loss"]) == 30
    assert record["loss"][-1] < record["loss"][0] - 0.1
    assert [record["scores"][name]["rows"] for name in ("before", "after")] == [12, 12]
    assert len(record["answers"]) == 12

    before = AutoModelForCausalLM.from_pretrained(place.parent / "xdg/torchturbo" / tiny.source.folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    assert any(not before[name].equal(after[name]) for name in before)
    assert (out / "model" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")

    for number in range(1, 6):
        assert f"\n{number}/5  " in text
    assert "0 of 12" in text
    assert "│" in text
    assert "turbo.yaml:4:6" in text
    assert "quickstart --steps" in text
    assert "step 30/30  loss" in text
    lines = [line for line in text.splitlines() if str(place.parent) not in line]
    assert max(map(len, lines)) <= 80


def test_the_printed_commands_run(place: Path, tiny) -> None:
    from torchturbo.cli.main import main
    from torchturbo.train.run import train

    commands = [shlex.split(command.replace("\\\n", " ")) for command in PRINTED.findall(run(tiny))]
    same, another, show = commands
    assert same[:2] == another[:2] == ["torchturbo", "train"]

    same[same.index("--output_dir") + 1] = "again"
    losses = module._losses(train(same[2:], quiet=True))
    assert [loss for _, loss in losses] == json.loads((place / "out" / RECORD).read_text())["loss"]

    assert another[another.index("--seed") + 1] == "1"
    train(another[2:], quiet=True)
    assert (place / "out" / "model-2" / "model.safetensors").is_file()
    assert main(show[1:]) == 0


def test_the_saved_configuration_holds_what_was_shown(place: Path, tiny) -> None:
    run(tiny, steps=1)
    config = load_config(str(place / "out" / "model" / "torchturbo.yaml"))
    assert (config.gbs, config.mixed_precision, config.activation_checkpointing.enabled) == (1, "fp32", False)


def test_an_environment_variable_beats_the_file_and_is_shown(
    place: Path, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = KEYS["gbs"].env
    assert variable
    monkeypatch.setenv(variable, "2")
    text = run(tiny, steps=1)
    line = next(line for line in text.splitlines() if line.strip().startswith("gbs "))
    assert line.split() == ["gbs", "2", "environment", variable]


def test_a_wrong_variable_ends_it_before_anything_is_prepared(
    place: Path, tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = KEYS["gbs"].env
    assert variable
    monkeypatch.setenv(variable, "none at all")
    with pytest.raises(ConfigError):
        run(tiny)
    assert variable in capsys.readouterr().err
    assert not (place / "out").exists()
    assert not (place.parent / "xdg/torchturbo" / tiny.source.folder).exists()


def test_a_second_run_stays_apart_from_the_first(place: Path, tiny) -> None:
    run(tiny, steps=1)
    first = (place / "out" / RECORD).read_bytes()
    text = run(tiny, steps=1, seed=1)
    assert (place / "out" / RECORD).read_bytes() == first
    assert json.loads((place / "out-2" / RECORD).read_text())["seed"] == 1
    assert "out holds an earlier run and stays as it is." in text
    assert "found in the cache, checksums right" in text


@pytest.mark.parametrize("stage", ["model_folder", "_losses"])
def test_an_interrupt_leaves_nothing_or_the_trained_model(
    place: Path, tiny, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, stage, interrupt)
    with pytest.raises(KeyboardInterrupt) as stop:
        run(tiny, steps=1)
    trained = stage == "_losses"
    assert isinstance(stop.value, Interrupted) is trained
    assert (place / "out" / "model" / "model.safetensors").is_file() is trained
    assert (place / "out").exists() is trained


def test_an_interrupt_within_the_training_leaves_nothing(place: Path, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_progress", lambda console: Interrupt())
    with pytest.raises(KeyboardInterrupt):
        run(tiny)
    assert not list(place.iterdir())


def test_a_bad_folder_is_told_before_the_conversion(place: Path, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "model_folder", lambda *args: pytest.fail("too late"))
    (place / "out").write_text("")
    with pytest.raises(QuickstartError, match="is a file"):
        run(tiny)


def test_the_hub_is_never_asked(place: Path, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def connect(*args: object) -> None:
        pytest.fail("something wants the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(tiny, steps=1)
