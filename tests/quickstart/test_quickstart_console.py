"""The console: colour, width, encoding, and the bar that only a terminal sees."""

from __future__ import annotations

import io
import os
import re

import pytest

from torchturbo.quickstart import console as module
from torchturbo.quickstart.console import BOLD, NARROWEST, WIDEST, Console

ESCAPE = re.compile(r"\033\[[\d;]*[mK]")


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(("columns", "expected"), [(20, NARROWEST), (80, 79), (300, WIDEST)])
def test_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, expected: int) -> None:
    monkeypatch.setattr(module.shutil, "get_terminal_size", lambda fallback: os.terminal_size((columns, 24)))
    assert Console(Terminal()).width == expected


def test_a_pipe_gets_no_escape_and_no_bar() -> None:
    stream = io.StringIO()
    console = Console(stream)
    with console.step(1, 2, "Work"):
        console.progress("working", 1, 10)
        console.say("done")
    assert "\033" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert stream.getvalue() == "\n1/2  Work\n  - done\n", "a StringIO names no encoding: ASCII then"


def test_a_terminal_gets_colour_and_a_bar_that_goes_away() -> None:
    stream = Terminal()
    console = Console(stream)
    assert console.style("x", BOLD) == "\033[1mx\033[0m"
    console.progress("working", 3, 12)
    assert "working" in stream.text
    assert stream.text.count("━") == 24
    console.line("next")
    assert stream.text.endswith("\r\033[Knext\n")
    console.progress("working", 4, 12)
    console.progress("working", 12, 12)
    assert stream.text.endswith("0 s\r\033[K")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = Console(stream)
    console.progress("working", 3, 12)
    console.say("done")
    console.end_bar()
    assert not re.search(r"\033\[[\d;]*m", stream.text)


def test_a_dumb_terminal_gets_no_escape_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = Console(stream)
    console.progress("working", 3, 12)
    console.say("done")
    assert "\033" not in stream.text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    stream = Terminal("ascii")
    console = Console(stream)
    console.progress("working", 3, 12)
    console.say("saved in Zoë's folder")
    console.table(("name",), [("a" * 200,)])
    assert stream.text.isascii()
    assert "- saved in Zo?'s folder" in ESCAPE.sub("", stream.text)


def test_the_bar_goes_on_counting_seconds_by_itself() -> None:
    stream = Terminal()
    console = Console(stream)
    console.progress("working", 0, 1)
    first = stream.text
    console._bar.stopped.wait(1.3)
    console.end_bar()
    assert len(stream.text) > len(first)
    assert re.search(r"working  1 s", stream.text)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_table_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(module.shutil, "get_terminal_size", lambda fallback: os.terminal_size((columns, 24)))
    stream = Terminal()
    console = Console(stream)
    console.table(("key", "value"), [("short", "v" * 150), ("a longer key of some length", "w")])
    lines = ESCAPE.sub("", stream.text).splitlines()
    assert max(map(len, lines)) <= console.width
    assert lines[2].startswith("  a longer key of some length  w")
    assert "…" in lines[1]


def test_long_words_stay_whole_to_be_copied() -> None:
    path = "/a/" + "long" * 40
    assert Console(io.StringIO()).wrap(f"saved in {path} today", 40) == ["saved in", path, "today"]


def test_cut_makes_one_line() -> None:
    console = Console(Terminal())
    assert console.cut("two\nlines  and more", 12) == "two lines a…"
    assert console.cut("short", 12) == "short"
