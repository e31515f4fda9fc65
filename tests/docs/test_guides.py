"""What the guides, the README and the examples say is true: commands run, configurations load, names exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from torchturbo.cli.main import main
from torchturbo.generated.keys import KEYS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if not page.is_symlink()]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml")) + sorted((ROOT / "examples").glob("*.json"))
FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$', re.S | re.M
)
WRONG_ON_PURPOSE = {"--tt_sp", "--tt_enable_mpt", "--tt_matmul_precision", "TORCH_TURBO_MATMUL_PRECISION"}
LAUNCHER = {"--tt_help"}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text("utf-8")):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)]
        found.append(Block(page.name, match["language"], match["title"] or "", "".join(lines)))
    return found


BLOCKS = [block for page in GUIDES for block in blocks(page)]
CONFIGURATIONS = [
    block
    for block in BLOCKS
    if block.language in ("yaml", "json")
    and (block.title in ("turbo.yaml", "turbo.json") or re.search(r"^# \$schema: .*torchturbo", block.text, re.M))
]
SHELL = [block for block in BLOCKS if block.language == "sh"]
COMMANDS = [
    (block.page, line)
    for block in SHELL
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("torchturbo ")
]
# Doctor's status says whether training could run: not where torch isn't installed.
SLOW = r"torchturbo (train|quickstart|llamafactory|plan .*--model)" + (
    "|torchturbo doctor" if find_spec("torch") is None else ""
)
FAST = [(page, line) for page, line in COMMANDS if not re.match(SLOW, line)]


def status(*words: str) -> int:
    """Run the command and return its exit status, whichever way it ends."""
    try:
        return main(list(words))
    except SystemExit as stopped:
        return int(stopped.code or 0)


def names(pattern: str) -> dict[str, str]:
    """Return what matches in the guides, with a page that has it."""
    return {name: page.name for page in GUIDES for name in re.findall(pattern, page.read_text("utf-8"))}


def test_there_is_something_to_check():
    assert len(CONFIGURATIONS) >= 5 and len(FAST) >= 8 and len(EXAMPLES) >= 4


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=[f"{block.page}-{n}" for n, block in enumerate(CONFIGURATIONS)])
def test_a_configuration_on_a_page_is_valid(block, tmp_path, capsys):
    path = tmp_path / f"turbo.{block.language}"
    path.write_text(block.text, "utf-8")
    assert status("config", "validate", str(path)) == 0, capsys.readouterr()


def test_the_two_formats_on_the_page_are_the_same_configuration(tmp_path, capsys):
    shown = []
    for block in blocks(ROOT / "docs" / "configuration.md"):
        if block.title in ("turbo.yaml", "turbo.json"):
            path = tmp_path / block.title
            path.write_text(block.text, "utf-8")
            assert status("config", "show", "--format", "json", "--tt_config", str(path)) == 0
            shown.append(capsys.readouterr().out)
    assert len(shown) == 2 and shown[0] == shown[1]


@pytest.mark.parametrize(("page", "line"), FAST)
def test_a_command_on_a_page_runs(page, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.partition(" > ")[0])[1:]
    if words[:2] != ["config", "init"]:
        assert status("config", "init", "turbo.yaml") == 0
    assert status(*words) == 0, capsys.readouterr()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(find_spec("transformers") is None, reason="the framework's options come from transformers")
def test_the_options_of_training_commands_exist():
    from torchturbo.train.arguments import FrameworkParser

    known = {option for action in FrameworkParser()._actions for option in action.option_strings}
    known |= {key.cli for key in KEYS.values() if key.cli}
    lines = [line for _, line in COMMANDS if " train" in line]
    lines += [line for block in SHELL for line in block.text.splitlines() if "-m torchturbo train" in line]
    assert len(lines) >= 4
    for line in lines:
        options = re.findall(r"(--\w+)", line.partition(" train")[2])
        assert set(options) <= known, line
    table = re.findall(r"^\| `(--\w+)` \|", (ROOT / "docs" / "training.md").read_text("utf-8"), re.M)
    assert len(table) >= 6 and set(table) <= known


def test_every_flag_and_variable_on_a_page_exists():
    flags = {key.cli for key in KEYS.values()} | LAUNCHER
    variables = {key.env for key in KEYS.values()}
    found = names(r"--tt_\w+(?<!_)") | names(r"TORCH_TURBO_\w+(?<!_)")
    assert len(found) > 10
    assert {name: page for name, page in found.items() if name not in flags | variables | WRONG_ON_PURPOSE} == {}


def test_the_errors_on_the_page_are_what_is_printed(tmp_path, monkeypatch, capsys):
    (sample,) = [block for block in BLOCKS if block.language == "console"]
    command, *expected = sample.text.splitlines()
    (tmp_path / "turbo.yaml").write_text('parallel_plan:\n  sp_size: "four"\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.removeprefix("$ torchturbo "))
    # The same options through a command that starts no training.
    assert status("config", "show", *words[1:]) == 2
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(expected)


def test_the_commands_named_in_the_text_exist(capsys):
    for words in {tuple(found.split()) for found in names(r"`torchturbo ((?:config )?[a-z]+)")}:
        if words == ("train",) and find_spec("transformers") is None:
            continue  # its help shows the framework's options
        assert status(*words, "--help") == 0, words
        assert words[-1] in capsys.readouterr().out


def test_sessions_named_on_a_page_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    assert sessions >= {"codegen", "lint", "typecheck", "tests", "ide", "docs", "package", "bench"}
    named = names(r"nox -s (\w+)")
    assert len(named) >= 3
    assert set(named) <= sessions


def test_the_readme_s_two_commands_are_what_ci_runs_and_what_the_pages_show():
    setup, tests = [block.text for block in blocks(ROOT / "README.md") if block.language == "sh"][:2]
    script = re.sub(r"^ +", "", (ROOT / ".ci" / "run").read_text("utf-8"), flags=re.M)
    for command in (setup, tests):
        assert re.sub(r"^ +", "", command, flags=re.M) in script
    for page in ("index.md", "first-run.md"):
        assert setup in (ROOT / "docs" / page).read_text("utf-8")
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert pin and re.findall(r"torch==(\S+)", "".join(page.read_text("utf-8") for page in GUIDES)).count(pin[1]) >= 4
    assert set(re.findall(r"torch==(\S+)", "".join(page.read_text("utf-8") for page in GUIDES))) == {pin[1]}


def test_the_table_of_keys_is_complete():
    text = (ROOT / "docs" / "training.md").read_text("utf-8").partition("## What the keys do")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| \[`([\w.]+)`\]", text, re.M))
    launch = {"config_path", "resume_allow"}
    # A section with a switch is one row, whatever else it holds.
    sections = {path.removesuffix(".enabled") for path in KEYS if path.endswith(".enabled")}
    rows = {path.rpartition(".")[0] if path.rpartition(".")[0] in sections else path for path in KEYS.keys() - launch}
    assert rows == named


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid(path, capsys):
    assert status("config", "validate", str(path)) == 0
    capsys.readouterr()
    assert status("config", "show", "--changed", "--format", "json", "--tt_config", str(path)) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed, "an example that changes nothing"


def test_python_on_a_page_runs(tmp_path):
    (block,) = [block for block in blocks(ROOT / "docs" / "configuration.md") if block.language == "python"]
    command = [sys.executable, "-c", block.text, "--tt_sp_size", "2", "--other"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.stdout == "2 --tt_sp_size\n", done.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="the page's own train.py needs torch")
@pytest.mark.parametrize("large", [False, True], ids=["read whole", "read by slices"])
def test_the_train_py_on_the_page_trains(large, tmp_path):
    import tiny

    tiny.save(tmp_path / "model")
    page = {block.title: block.text for block in blocks(ROOT / "docs" / "training.md") if block.title}
    text = page["train.py"]
    if large:  # the same program, with the other block in place of its model and its trainer
        model, trainer = page["large.py, in place of the model and the trainer above"].split("\ntrainer = ")
        text = re.sub(r"^model = .*$", lambda _: model, text, flags=re.M)
        text = re.sub(r"^trainer = .*?^\)$", lambda _: f"trainer = {trainer}", text, flags=re.M | re.S)
    (tmp_path / "train.py").write_text(text.replace("PATH_OR_NAME", "model"), "utf-8")
    (tmp_path / "lines.txt").write_text("hello there\nhow are you\n" * 4, "utf-8")
    options = ["--tt_gbs", "2", "--output_dir", "out", "--max_steps", "2", "--save_steps", "2", "--report_to", "none"]
    command = [sys.executable, "train.py", *options, "--per_device_train_batch_size", "1", "--use_cpu", "true"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "gbs: 2" in (tmp_path / "out" / "checkpoint-2" / "torchturbo.yaml").read_text("utf-8")
