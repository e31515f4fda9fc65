"""``torchturbo llamafactory`` up to LLaMA-Factory's import: everything at once, in a moment; help; several ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, python, said

from torchturbo.adapters.llama_factory.command import read_command
from torchturbo.adapters.llama_factory.launcher import relaunch, torchrun
from torchturbo.cli.main import main
from torchturbo.errors import ConfigError, Problem

NOT_YET = ("torch", "transformers", "llamafactory", "jsonschema")


@pytest.fixture(autouse=True)
def _file(factory: Path) -> None:
    Path("train.yaml").write_text("do_train: true\nbf16: true\nstage: sft\n")


def environment(factory: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{factory.parent}", **more}


def test_a_launch_is_read_without_torch(factory: Path) -> None:
    """Bad input is told before anything heavy is imported."""
    code = (
        "import sys; from torchturbo.adapters.llama_factory.command import read_command as read;"
        "read(['train.yaml', '--tt_gbs', '4']);"
        f"print([name for name in {NOT_YET!r} if name in sys.modules])"
    )
    done = python("-c", code, env=environment(factory))
    assert ("[]\n", "") == (done.stdout, done.stderr)


def test_everything_at_once_in_a_moment(factory: Path) -> None:
    """Options, file, words and variables; LLaMA-Factory's import would take ten seconds."""
    words = [
        "train.yaml",
        "stage=dpo",
        "quantization_bit=4",
        "--tt_gbs",
        "0",
        "tt_sp_size=2",
        "nonsense",
        "--tt_plugin",
        "no.py",
    ]
    environ = environment(factory, USE_RAY="1", TORCH_TURBO_OP_POLICY="fast", ACCELERATE_USE_FSDP="true")
    started = time.monotonic()
    done = python("-m", "torchturbo", "llamafactory", *words, env=environ)
    seconds = time.monotonic() - started

    assert (2, "") == (done.returncode, done.stdout)
    lines = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines), done.stderr
    for part in (
        "--tt_gbs",
        "OP_POLICY",
        "stage dpo",
        "quantization_bit=4",
        "tt_sp_size=2",
        "nonsense",
        "USE_RAY",
        "no.py",
    ):
        assert 1 == sum(part in line.partition("; ")[0] for line in lines), (part, lines)
    assert any("ACCELERATE_USE_FSDP" in line for line in lines)
    assert 9 == len(lines)
    assert seconds < 5  # with room for a busy machine; alone it takes half a second


def test_without_llamafactory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with its arguments and our options is told beside it."""
    absent = Problem("", "", "LLaMA-Factory is not installed", "install it")
    monkeypatch.setattr("torchturbo.adapters.llama_factory.command.missing_package", lambda: absent)
    assert 2 == main(["llamafactory", "train.yaml", "use_muon=true", "--tt_gbs", "0", "--tt_plugin", "none.py"])
    own, muon, package, plugin = capsys.readouterr().err.splitlines()
    assert "error: --tt_gbs: expected at least 1, got 0" == own
    assert muon.startswith("error: use_muon=true: another owner of the optimizer")
    assert "error: LLaMA-Factory is not installed; install it" == package
    assert plugin.startswith("error: none.py: no such file")


def test_it_is_a_module_too(factory: Path) -> None:
    """The same command."""
    one, two = (
        python("-m", *module, "train.yaml", "stage=kto", env=environment(factory))
        for module in (["torchturbo", "llamafactory"], ["torchturbo.adapters.llama_factory"])
    )
    assert (2, one.stderr) == (two.returncode, two.stderr)
    assert "stage kto" in one.stderr


def test_layers_and_places() -> None:
    """The file's value has its line; a layer of ours beats it with a line of both."""
    command = read_command(["train.yaml", "max_steps=3"])
    assert "train.yaml:2:7: bf16" == command.config.origin("mixed_precision").place
    assert {"do_train": True, "bf16": True, "stage": "sft", "max_steps": 3} == command.arguments.for_framework
    with said() as lines:
        config = read_command(["train.yaml", "--tt_mixed_precision", "fp32"]).config
    assert "fp32" == config.mixed_precision
    (line,) = lines
    assert "train.yaml:2:7: bf16 asked the framework for bf16; --tt_mixed_precision sets fp32" in line


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["train.yaml", "--help"]])
def test_help_shows_both_sides(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """How LLaMA-Factory's arguments are given, and our options; no import of it."""
    assert 0 == main(["llamafactory", *words])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: torchturbo llamafactory FILE [KEY=VALUE ...] [OPTION ...]")
    assert "llamafactory-cli train --help" in shown and "--tt_gbs GBS" in shown
    assert "llamafactory" not in sys.modules


def test_our_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The one of every command."""
    with pytest.raises(SystemExit) as left:
        main(["llamafactory", "--tt_help"])
    assert 0 == left.value.code
    assert (ROOT / "generated" / "help.txt").read_text("utf-8") == capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_it(shell: str) -> None:
    """With our options and its file."""
    script = (ROOT / "generated" / "completion" / f"torchturbo.{shell}").read_text("utf-8")
    assert "llamafactory" in script


# ---- several ranks ----

WORDS = ["my train.yaml", "run_name=my run", "--tt_gbs", "4"]
REST = ["-m", "torchturbo", "llamafactory", *WORDS]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["--nproc_per_node", "2", "--standalone"]),
        ({"NPROC_PER_NODE": "8", "NNODES": "1"}, ["--nproc_per_node", "8", "--standalone"]),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
            ["--nproc_per_node", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1",
             "--master_port", "1234"],
        ),
    ],
)  # fmt: skip
def test_the_torchrun_that_is_started(environ: dict[str, str], expected: list[str]) -> None:
    """This Python's own, whatever is on PATH; words with blanks stay whole."""
    assert [sys.executable, "-m", "torch.distributed.run", *expected, *REST] == torchrun(WORDS, 2, environ)


@pytest.mark.parametrize("name", ["RDZV_ID", "MIN_NNODES", "MAX_NNODES", "MAX_RESTARTS"])
def test_elastic_launches_are_torchruns(name: str) -> None:
    """Its own options say more than these variables."""
    problem = torchrun(WORDS, 2, {name: "3"})
    assert isinstance(problem, Problem)
    assert (name, True) == (problem.place, "torchrun ... -m torchturbo llamafactory" in problem.remedy)


@pytest.mark.parametrize(
    ("devices", "environ", "words", "started"),
    [
        (4, {}, [], "4"),
        (1, {}, [], None),
        (0, {}, [], None),
        (0, {"FORCE_TORCHRUN": "1"}, [], "1"),
        (0, {"FORCE_TORCHRUN": "yes"}, [], None),
        (4, {"LOCAL_RANK": "0"}, [], None),
        (4, {"RANK": "0"}, [], None),
        (4, {}, ["use_cpu=true"], None),
        (4, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}, ["use_cpu=true"], "2"),
    ],
)
def test_when_ranks_are_started(
    devices: int, environ: dict[str, str], words: list[str], started: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LLaMA-Factory's launcher does: several devices, or when told to; never inside a rank."""
    for name in ("RANK", "LOCAL_RANK", "FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr("torchturbo.adapters.llama_factory.launcher._devices", lambda: devices)
    monkeypatch.setattr("os.execv", lambda program, line: calls.append(line))

    line = ["train.yaml", *words]
    relaunch(read_command(line), line)

    assert [] == calls if started is None else [started] == [call[4] for call in calls]
    assert all(call[-len(line) :] == line for call in calls)


def test_the_line_that_is_told_holds_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are kept, and a token may be among the words."""
    for name in ("RANK", "LOCAL_RANK", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    monkeypatch.setattr("os.execv", lambda program, line: None)
    line = ["train.yaml", "--hf_hub_token=hf_secret"]
    with said() as lines:
        relaunch(read_command(line), line)

    (started,) = [line for line in lines if line.startswith("starting ")]
    assert started.endswith("--standalone -m torchturbo llamafactory (your words)")
    assert "hf_secret" not in "".join(lines)


def test_an_elastic_launch_ends_with_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    monkeypatch.setenv("RDZV_ID", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError):
        relaunch(read_command(["train.yaml"]), ["train.yaml"])


def test_outcomes_are_those_of_train(factory: Path) -> None:
    """An error of LLaMA-Factory's own is one line."""
    tuner = factory / "train" / "tuner.py"
    tuner.write_text(tuner.read_text().replace("callbacks=None): ...", "callbacks=None): raise KeyError('inside')"))
    done = python("-m", "torchturbo", "llamafactory", "train.yaml", env=environment(factory))

    assert 1 == done.returncode
    assert "error: KeyError: 'inside'; set TORCHTURBO_DEBUG=1" in done.stderr and "Traceback" not in done.stderr
