"""The guide's examples run as they stand there, and the arguments in its tables exist."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchturbo.engine.args import set_torchturbo_args

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "llama-factory.md").read_text("utf-8")
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', GUIDE, re.S | re.M)
COMMANDS = [line for language, _, text in BLOCKS if language == "sh" for line in text.splitlines()]
HERE = [line for line in COMMANDS if re.match(r"torchturbo|python -m torchturbo", line)]
FIRST_WORDS = {"pip", "torchrun", "torchturbo", "python"}


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the guide's files beside the model and the data that they name."""
    here = tmp_path_factory.mktemp("guide")
    for name in ("model", "data"):
        (here / name).symlink_to(material / name)
    for _, title, text in BLOCKS:
        if title:
            (here / title).write_text(text, "utf-8")
    return here


@pytest.mark.parametrize("line", HERE)
def test_a_command_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To its end, with a model in its output folder."""
    from torchturbo.cli.main import main

    monkeypatch.chdir(folder)
    words = shlex.split(line)
    try:
        assert 0 == main(["llamafactory", *words[3 if words[0] == "python" else 2 :]])
    finally:
        set_torchturbo_args(None)
    named = re.search(r"output_dir[ =](\S+)", line)
    output = folder / (named[1] if named else "runs/identity")
    assert list(output.glob("*.safetensors")) and (output / "torchturbo.yaml").is_file()


def test_the_line_for_several_devices(folder: Path) -> None:
    """The torchrun line is started by this Python's torchrun; every kind of command is known here."""
    (line,) = [line for line in COMMANDS if line.startswith("torchrun")]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(line)[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ranks = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
    assert 0 == ranks.returncode, ranks.stderr[-2000:]
    assert "x data-parallel ranks 2 = 16 sequences" in ranks.stderr
    assert (folder / "runs" / "f" / "model.safetensors").is_file()

    assert FIRST_WORDS == {line.split()[0] for line in COMMANDS}


def test_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It prints what the guide says."""
    monkeypatch.chdir(folder)
    exec(compile((folder / "program.py").read_text(), "program.py", "exec"), {})
    (said,) = re.findall(r"prints `([^`]+)`", GUIDE)
    assert said in capfd.readouterr().out


def test_the_arguments_in_its_tables_exist() -> None:
    """By LLaMA-Factory's own dataclasses."""
    from torchturbo.adapters.llama_factory.package import import_package

    fields = {field.name for kind in import_package().arguments for field in dataclasses.fields(kind)}
    tables = GUIDE.partition("## Argument by argument")[2].partition("## Resuming")[0]
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row.partition(": ")[0])}
    assert len(names) > 50
    assert set() == names - fields
