"""What the tests of plugins share: files written into a folder, and loading by the words of a command line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.plugins.load import load_plugins

HEAD = "from torchturbo.plugins import Plugin, register\n\n"


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and rows to train it on; nothing writes there."""
    path = tmp_path_factory.mktemp("plugins")
    tiny.save(path / "model")
    tiny.write_jsonl(path / "rows.jsonl", tiny.rows(24))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder, so that places are as short as a user sees them."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """Write a file of the folder; a Python file gets the imports of a plugin unless ``bare``."""

    def file(name: str, text: str, bare: bool = False) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(text)
        path.write_text(text if bare or not name.endswith(".py") else HEAD + text, encoding="utf-8")
        return path

    return file


@pytest.fixture
def load(folder: Path) -> Callable[..., tuple[list[Any], list[str]]]:
    """Load plugins as a launch names them; problems come back as the lines that a user sees."""

    def plugins(*given: str, framework: str = "hf_trainer") -> tuple[list[Any], list[str]]:
        words = [word for text in given for word in ("--tt_plugin", text)]
        made, problems = load_plugins(build_from_args(parse_torchturbo_args(words)[0]), framework)
        return made, list(map(str, problems))

    return plugins
