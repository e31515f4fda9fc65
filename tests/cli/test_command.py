"""The `torchturbo` command itself: help, version, completion, exit statuses, pipes, colour."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, python

import torchturbo as package
from torchturbo.cli import main as command
from torchturbo.cli.parser import SHELLS
from torchturbo.cli.terminal import columns, definitions
from torchturbo.errors import ConfigError, wants_colour
from torchturbo.generated.keys import KEYS

Run = Callable[..., Any]


def test_version(torchturbo: Run) -> None:
    """The package's own."""
    assert (0, f"torchturbo {package.__version__}\n", "") == torchturbo("--version")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(torchturbo: Run, words: tuple[str, ...]) -> None:
    """Without arguments too; it fits a narrow terminal and points at a first step."""
    done = torchturbo(*words)
    assert (0, "") == (done.status, done.err)
    for name in command.COMMANDS:
        assert f"\n    {name}" in done.out
    assert "torchturbo quickstart" in done.out


@pytest.mark.parametrize("words", [("config", "--help"), ("config", "show", "--help"), ("config", "explain", "-h")])
def test_each_command_has_help(torchturbo: Run, words: tuple[str, ...]) -> None:
    """Printed on stdout, status 0."""
    done = torchturbo(*words)
    assert (0, "") == (done.status, done.err)
    assert done.out.startswith(f"usage: torchturbo {' '.join(words[:-1])}")


@pytest.mark.parametrize("words", [("--tt_help",), ("config", "show", "--tt_help"), ("config", "explain", "--tt_help")])
def test_our_options_have_help_of_their_own(torchturbo: Run, words: tuple[str, ...]) -> None:
    """The same text from every command that takes the options."""
    done = torchturbo(*words)
    assert (0, "") == (done.status, done.err)
    assert (ROOT / "generated" / "help.txt").read_text(encoding="utf-8") == done.out


@pytest.mark.parametrize(
    "words", [("nope",), ("--nope",), ("config",), ("config", "nope"), ("completion",), ("completion", "tcsh")]
)
def test_wrong_commands_are_status_2(torchturbo: Run, words: tuple[str, ...]) -> None:
    """A usage line and what is wrong on stderr, nothing on stdout, no traceback."""
    done = torchturbo(*words)
    assert (2, "") == (done.status, done.out)
    assert "error: " in done.err and "Traceback" not in done.err


def test_it_is_a_module_too(tmp_path: Path) -> None:
    """python -m torchturbo is what torchrun starts; statuses get through."""
    done = python("-m", "torchturbo", "config", "show", "--changed", cwd=tmp_path)
    assert (0, "every key has its default\n", "") == (done.returncode, done.stdout, done.stderr)
    done = python("-m", "torchturbo", "config", "show", "--tt_gbs", "0", cwd=tmp_path)
    assert (2, "", "error: --tt_gbs: expected at least 1, got 0\n") == (done.returncode, done.stdout, done.stderr)


# -- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_the_script_of_a_shell(torchturbo: Run, shell: str) -> None:
    """The generated file, in which every option stands."""
    done = torchturbo("completion", shell)
    assert (0, "") == (done.status, done.err)
    assert (ROOT / "generated" / "completion" / f"torchturbo.{shell}").read_text(encoding="utf-8") == done.out
    for key in KEYS.values():
        assert key.cli is None or key.cli.removeprefix("--") in done.out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("torchturbo conf", ["config"]),
        ("torchturbo config ", ["show", "explain", "validate", "init", "schema"]),
        ("torchturbo train --tt_mixed_precision ", ["bf16", "fp32"]),
        ("torchturbo train --tt_mixed_precision b", ["bf16"]),
        ("torchturbo train --tt_sp", ["--tt_sp_size"]),
        (
            "torchturbo train --output_dir out --tt_card_name h",
            ["h20", "h100", "h200", "h100-pcie", "h100-nvl", "h200-nvl"],
        ),
        ("torchturbo train --tt_enable_mtp ", ["true", "false"]),
        ("torchturbo config show --tt_prefetch_dir", ["--tt_prefetch_direction"]),
        ("torchturbo config show --format ", ["table", "yaml", "json"]),
        ("torchturbo train --tt_config tur", ["turbo.yaml"]),
        ("torchturbo config validate tur", ["turbo.yaml"]),
        ("torchturbo completion ", list(SHELLS)),
    ],
)
def test_bash_completes(line: str, offered: list[str], tmp_path: Path) -> None:
    """The script, sourced by a real bash, offers commands, options, values and files."""
    (tmp_path / "turbo.yaml").touch()
    *words, last = line.split(" ")
    script = (
        f"source {ROOT / 'generated' / 'completion' / 'torchturbo.bash'}\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}\n'
        "$(complete -p torchturbo | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command_line = ["bash", "--norc", "-c", script, "bash", *words, last]
    done = subprocess.run(command_line, capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert ("", offered) == (done.stderr, done.stdout.split())


# -- pipes, colour, locale --------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`torchturbo config show | head -1` ends quietly."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = python("-m", "torchturbo", "config", "show", cwd=tmp_path, capture_output=False, stdout=theirs, stderr=-1)
    os.close(theirs)
    assert (command.BROKEN_PIPE, "") == (done.returncode, done.stderr)


def test_colour_is_for_terminals_alone(tmp_path: Path) -> None:
    """Piped output has none; a terminal gets it unless NO_COLOR is set or it is dumb."""
    words = ("-m", "torchturbo", "config", "show", "--tt_nope")
    piped = python(*words, cwd=tmp_path)
    assert "\033" not in piped.stdout + piped.stderr
    assert "\033[1;31merror:\033[0m --tt_nope: " in on_terminal(*words, cwd=tmp_path)
    assert "\033" not in on_terminal(*words, cwd=tmp_path, env={"NO_COLOR": "1"})
    assert "\033" not in on_terminal(*words, cwd=tmp_path, env={"TERM": "dumb"})
    shown = on_terminal("-m", "torchturbo", "config", "explain", "gbs", cwd=tmp_path)
    assert shown.startswith("\033[1mgbs\033[0m")


def on_terminal(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run Python on a pseudo-terminal and return what it wrote there."""
    import pty

    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(env or {})}
    if "NO_COLOR" not in (env or {}):
        environ.pop("NO_COLOR", None)
    with subprocess.Popen([sys.executable, *words], stdout=theirs, stderr=theirs, env=environ, cwd=cwd):
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's end of a pseudo-terminal
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode()


def test_an_empty_no_color_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://no-color.org: when present and not an empty string."""

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(Terminal()) is True
    monkeypatch.setenv("NO_COLOR", "0")
    assert wants_colour(Terminal()) is False
    monkeypatch.delenv("NO_COLOR")
    assert wants_colour(object()) is False


def test_the_c_locale_is_no_obstacle(tmp_path: Path) -> None:
    """Help, tables and errors about other alphabets print on a terminal that knows ASCII alone."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["--help"], ["--tt_help"], ["config", "show"], ["config", "init", "-"], ["completion", "bash"]):
        done = python("-m", "torchturbo", *words, cwd=tmp_path, env=ascii_only)
        assert (0, "") == (done.returncode, done.stderr), words
    (tmp_path / "t.yaml").write_text('mfu: {card: "▁"}\n"▁": 1\n', encoding="utf-8")
    done = python("-m", "torchturbo", "config", "validate", "t.yaml", cwd=tmp_path, env=ascii_only)
    assert (1, 3, "") == (done.returncode, len(done.stdout.splitlines()), done.stderr)


# -- how a run ends ---------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that makes `torchturbo config` raise."""

    def make(error: BaseException) -> None:
        def run(words: list[str]) -> int:
            raise error

        monkeypatch.setattr("torchturbo.cli.config.run", run)

    return make


def test_an_unexpected_error_is_one_line(torchturbo: Run, failing: Callable[[BaseException], None]) -> None:
    """Status 1, the error's name and text, and how to see more."""
    failing(RuntimeError("it broke"))
    line = "error: RuntimeError: it broke; set TORCHTURBO_DEBUG=1 to see where it happened\n"
    assert (1, "", line) == torchturbo("config")


def test_a_developer_gets_the_traceback(
    torchturbo: Run, failing: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TORCHTURBO_DEBUG=1 lets the error through."""
    failing(RuntimeError("it broke"))
    monkeypatch.setenv("TORCHTURBO_DEBUG", "1")
    with pytest.raises(RuntimeError, match="it broke"):
        torchturbo("config")


def test_a_developer_sees_where_bad_input_was_refused(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHTURBO_DEBUG=1 adds the stack to the lines about bad input, which are the same without it."""
    plain = torchturbo("config", "show", "--tt_gbs", "x")
    monkeypatch.setenv("TORCHTURBO_DEBUG", "1")
    done = torchturbo("config", "show", "--tt_gbs", "x")
    assert 2 == plain.status == done.status
    assert 1 == len(plain.err.splitlines())
    assert done.err.endswith(plain.err)
    assert "in config_of" in done.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "trian",
            "error: COMMAND: expected one of train, plan, llamafactory, quickstart, config, doctor, completion, got 'trian'; did you mean train?",
        ),
        (
            "config shwo",
            "error: ACTION: expected one of show, explain, validate, init, schema, got 'shwo'; did you mean show?",
        ),
        (
            "config show --chnged",
            "error: --chnged: not an argument of `torchturbo config show`; did you mean --changed?",
        ),
        ("quickstart --stpes 3", "error: --stpes: not an argument of `torchturbo quickstart`; did you mean --steps?"),
        ("config", "error: the following arguments are required: ACTION; see `torchturbo config --help`"),
        ("--versoin", "error: --versoin: not an argument of `torchturbo`; did you mean --version?"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(torchturbo: Run, words: str, line: str) -> None:
    """A command, an action and an option each get one line that names what was meant."""
    done = torchturbo(*words.split())
    assert (2, "", [line]) == (done.status, done.out, done.err.splitlines())


def test_an_interrupt_is_status_130(
    torchturbo: Run, failing: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with one line a node."""
    failing(KeyboardInterrupt())
    assert (130, "", "\ntorchturbo: interrupted\n") == torchturbo("config")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (130, "", "") == torchturbo("config")


def test_bad_input_is_status_2(torchturbo: Run, failing: Callable[[BaseException], None]) -> None:
    """Its lines are printed where it is found; nothing is added."""
    failing(ConfigError([]))
    assert (2, "", "") == torchturbo("config")


# -- layout -----------------------------------------------------------------------------------------------------------


def test_columns_are_aligned() -> None:
    """Two blanks between, none at the end of a line."""
    assert "a    bb\nccc  d" == columns([("a", "bb"), ("ccc", "d")])
    assert "" == columns([])


def test_definitions_wrap_beside_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text goes on under itself."""
    monkeypatch.setenv("COLUMNS", "60")
    text = definitions([("a", "word " * 20), ("name", "x")])
    lines = text.splitlines()
    assert lines[0].startswith("a     word") and lines[1].startswith("      word") and "name  x" == lines[-1]
    assert max(map(len, lines)) <= 60
