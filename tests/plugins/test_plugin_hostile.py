"""Plugins from hostile paths: whatever stands where a plugin or its settings should, told without a hang or a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ONE = """\
    @register()
    class Some(Plugin):
        pass
"""


def hostile(folder: Path, name: str) -> None:
    """Make the file of a name in the way that the name says."""
    path = folder / name
    if name.startswith("loop"):
        path.symlink_to(path)
    elif name.startswith("dangling"):
        path.symlink_to(folder / "nowhere")
    elif name.startswith("folder"):
        path.mkdir()
    elif name.startswith("pipe"):
        os.mkfifo(path)
    elif name.startswith("device"):
        path.symlink_to("/dev/zero")
    elif name.startswith("large"):
        with path.open("wb") as file:
            file.truncate(20_000_000)


SUFFIXED = [
    ("loop", "cannot be read: Too many levels of symbolic links"),
    ("dangling", "no such file; the path is taken from {cwd}"),
    ("folder", "expected a file, got a directory; name a {kind} file"),
    ("pipe", "expected a file, got a pipe; name a {kind} file"),
    ("device", "expected a file, got a device; name a {kind} file"),
    ("large", "larger than 10 MB; a {what} is a few kilobytes; is it the right file?"),
]


@pytest.mark.parametrize(("name", "message"), SUFFIXED, ids=[name for name, _ in SUFFIXED])
def test_a_path_that_is_no_readable_file(name: str, message: str, folder: Path, write: Any, load: Any) -> None:
    """As plugin and as CONFIG: told, without a hang, and nothing is written."""
    write("good.py", ONE)
    hostile(folder, f"{name}.py")
    hostile(folder, f"{name}.yaml")
    before = sorted(folder.rglob("*"))
    cwd = os.getcwd()

    _, problems = load(f"{name}.py", f"good.py:{name}.yaml")

    assert [
        f"{name}.py: " + message.format(cwd=cwd, kind="Python", what="plugin"),
        f"{name}.yaml: " + message.format(cwd=cwd, kind="YAML or JSON", what="configuration"),
    ] == problems
    assert before == sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x7fELF\x02\x01\x01\0\0\0", "a.py"),
        (b"x = '\xff\xfe'\n", "a.py:1"),
        (b"# coding: klingon\n", "a.py"),
        (b"\xff\xfex\0=\0", "a.py"),
        (b"x = 1\0\n", "a.py: is no Python"),
        (b"(" * 100_000, "a.py:1"),
        (b"-" * 200_000 + b"1", "a.py: is no Python that can be read"),
        (b"", "a.py: registers no plugin"),
        (b"from torchturbo.plugins import Plugin, register\n@register()\nclass A(Plu", "a.py:3"),
    ],
    ids=["binary", "latin-1", "encoding", "utf-16", "nul", "deep", "endless", "empty", "truncated"],
)
def test_a_file_that_is_no_python(data: bytes, problem: str, folder: Path, load: Any) -> None:
    (folder / "a.py").write_bytes(data)

    plugins, (found,) = load("a.py")

    assert [] == plugins
    assert found.startswith(problem) and "\n" not in found


def test_an_encoding_that_the_file_declares_is_read(folder: Path, load: Any) -> None:
    """PEP 263 and the byte order mark, as Python itself reads a file."""
    text = "from torchturbo.plugins import Plugin, register\n@register()\nclass A(Plugin):\n    mark = '\u00e9'\n"
    (folder / "a.py").write_bytes(b"# coding: latin-1\n" + text.encode("latin-1"))
    (folder / "b.py").write_bytes(b"\xef\xbb\xbf" + text.replace("class A", "class B").encode())

    plugins, problems = load("a.py", "b.py")

    assert (["\u00e9", "\u00e9"], []) == ([plugin.mark for plugin in plugins], problems)


def test_an_unreadable_file_is_told(write: Any, load: Any, monkeypatch: Any) -> None:
    """Whoever runs this may be root, who reads every file: the refusal is made here."""
    write("a.py", ONE)

    def refused(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("torchturbo.config.document.files._without_waiting", refused)

    assert ["a.py: cannot be read: Permission denied"] == load("a.py")[1]


def test_names_that_no_file_can_have(load: Any) -> None:
    """NUL, and longer than any name."""
    _, (first, second) = load("a\0.py", "x" * 5000 + ".py")

    assert "a\\0.py: no file can have this name" == first
    assert "cannot be read: File name too long" in second and len(second) < 4500


def test_dots_lead_where_the_shell_would(write: Any, load: Any) -> None:
    write("sub/a.py", ONE)

    assert [] == load("sub/../sub/a.py")[1]


def test_a_file_that_becomes_a_pipe_is_no_wait(write: Any, folder: Path, load: Any, monkeypatch: Any) -> None:
    """Swapped between the look at it and its opening: read as empty."""
    plain = os.stat(write("a.py", ONE))
    Path("a.py").unlink()
    os.mkfifo("a.py")
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: plain if str(path) == "a.py" else real(path, **more))

    assert ["a.py: registers no plugin; put @register() from torchturbo.plugins above its Plugin class"] == load(
        "a.py"
    )[1]


def test_what_runs_is_what_was_hashed(write: Any, load: Any, monkeypatch: Any) -> None:
    """The file is read once: one that is swapped meanwhile changes neither the code nor the record alone."""
    import hashlib

    path = write("a.py", "@register()\nclass A(Plugin):\n    mark = 'first'\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    from torchturbo.plugins import modules

    real = modules._compiled

    def swapped(data: bytes, name: str) -> Any:
        path.write_text("swapped = 1\n")
        return real(data, name)

    monkeypatch.setattr(modules, "_compiled", swapped)
    (plugin,), problems = load("a.py")

    assert ("first", digest, []) == (plugin.mark, plugin.origin.sha256, problems)
