"""The command: options, environment, exit statuses, and one line for whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchturbo.cli import quickstart as command
from torchturbo.quickstart import run as module
from torchturbo.quickstart.command import Options
from torchturbo.quickstart.errors import Interrupted, QuickstartError


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back what the command sets for the libraries."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def replace_run(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> list[Options]:
    seen: list[Options] = []

    def quickstart(options: Options, console: object) -> None:
        seen.append(options)
        if error is not None:
            raise error

    monkeypatch.setattr(module, "quickstart", quickstart)
    return seen


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replace_run(monkeypatch)
    assert command.run([]) == 0
    assert command.run(["--output_dir", "~/x", "--steps", "7", "--seed", "3"]) == 0
    assert seen == [
        Options(Path("torchturbo-quickstart"), 20, 0),
        Options(Path.home() / "x", 7, 3),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "error: --steps: expected a whole number from 1 to 100000, got '0'"),
        (["--steps", "many"], "error: --steps: expected a whole number from 1 to 100000, got 'many'"),
        (["--steps", "1_0"], "error: --steps: expected a whole number from 1 to 100000, got '1_0'"),
        (["--seed", "-1"], "error: --seed: expected"),
        (["--seed", "4294967296"], "error: --seed: expected a whole number from 0 to 4294967295"),
        (["--output_dir", " "], "error: --output_dir: expected the path of a folder, got nothing"),
        (["--step", "3"], "error: --step: not an argument of `torchturbo quickstart`; did you mean --steps?"),
        (["file"], "error: file: not an argument of `torchturbo quickstart`"),
    ],
)
def test_wrong_options(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.run(arguments)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from torchturbo.cli.main import main\n"
        "try: main(['quickstart', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--output_dir DIR" in done.stdout
    assert "(default: 20)" in done.stdout


def test_what_the_libraries_read_is_set_first(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch)
    for name in ("OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ["HF_HUB_OFFLINE"] = "0"
    command.run([])
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch)
    os.environ.update(OMP_WAIT_POLICY="ACTIVE", CUDA_VISIBLE_DEVICES="2")
    command.run([])
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("ACTIVE", "2")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (QuickstartError("no space", "free some"), 1, "error: no space; free some\n"),
        (QuickstartError("a file", "another", status=2), 2, "error: a file; another\n"),
        (
            KeyboardInterrupt(),
            130,
            "stopped: nothing unfinished was kept; run the same command to start again\n",
        ),
        (
            Interrupted(Path("run/model")),
            130,
            "stopped: the trained model stays in run/model; run the same command to start again\n",
        ),
    ],
)
def test_each_end_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    replace_run(monkeypatch, error)
    os.environ.pop("TORCHTURBO_DEBUG", None)
    assert command.run([]) == status
    assert capsys.readouterr() == ("", line)


def test_an_error_does_not_stand_behind_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("torchturbo.quickstart.console.Console.end_bar", lambda console: ended.append(True))
    for error in (QuickstartError("no space"), KeyboardInterrupt()):
        replace_run(monkeypatch, error)
        command.run([])
    assert len(ended) == 2


def test_a_developer_gets_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, QuickstartError("no space"))
    os.environ["TORCHTURBO_DEBUG"] = "1"
    with pytest.raises(QuickstartError):
        command.run([])


def test_missing_packages_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = replace_run(monkeypatch)
    find = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name in ("torch", "gguf") else find(name)
    )
    assert command.run([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: not installed: torch, gguf; ")
    assert error.endswith('-m pip install "torchturbo[train]"\n')
    assert seen == []


def test_under_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = replace_run(monkeypatch)
    os.environ["WORLD_SIZE"] = "2"
    assert command.run([]) == 2
    assert "run torchturbo quickstart without torchrun" in capsys.readouterr().err
    assert seen == []
