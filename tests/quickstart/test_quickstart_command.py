"""The training command as it is printed: right for a shell, short, and as this user can start it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from torchturbo.generated.keys import KEYS
from torchturbo.quickstart.command import Options, command_lines, program, shown_path, train_arguments
from torchturbo.quickstart.output import Output
from torchturbo.quickstart.report import final_loss


def test_command_lines_break_before_options_and_quote() -> None:
    command = ["torchturbo", "train", "--dataset", "my tickets.jsonl", "--seed", "0", "--output_dir", "x" * 30]
    lines = command_lines(command, 46)
    assert lines[0] == "torchturbo train --dataset 'my tickets.jsonl' \\"
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == command
    assert all(line.startswith("  ") for line in lines[1:])


def test_paths_are_short_within_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(Path("a/b")) == os.path.join("a", "b")
    assert shown_path(tmp_path.parent) == str(tmp_path.parent)


def test_the_final_loss_is_a_mean_of_the_last_steps() -> None:
    assert final_loss([(step, float(step)) for step in range(1, 11)]) == 8.0
    assert final_loss([(1, 2.0)]) == 2.0


def test_training_arguments_name_the_configuration_file(tmp_path: Path) -> None:
    output = Output.claim(tmp_path / "out", 1)
    arguments = train_arguments(Options(tmp_path / "out", 4, 9), output, tmp_path / "model")
    assert arguments[:2] == [KEYS["config_path"].cli, shown_path(output.config)]
    assert arguments[arguments.index("--seed") + 1] == "9"
    assert arguments[arguments.index("--max_steps") + 1] == "4"


def test_the_program_is_named_as_this_user_can_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("torchturbo", "python"):
        (binaries / name).write_text("")
        (binaries / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    script, python = str(binaries / "torchturbo"), str(binaries / "python")
    module_file = str(tmp_path / "torchturbo" / "__main__.py")

    monkeypatch.setenv("PATH", str(binaries))
    assert program(script, python) == ["torchturbo"]
    assert program(module_file, python) == ["python", "-m", "torchturbo"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert program(".venv/bin/torchturbo", python) == [os.path.join(".venv", "bin", "torchturbo")]
    assert program(module_file, python) == [os.path.join(".venv", "bin", "python"), "-m", "torchturbo"]
    assert program("/usr/lib/pytest/__main__.py", python) == ["torchturbo"]
