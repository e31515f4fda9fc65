"""What the tests of the plan share: models without weights that cost nothing to make, and a way to run the command."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny


class Done(NamedTuple):
    """How the command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The errors that the plan tells, each on one line again."""
        section = self.out.partition("\nerrors\n")[2].partition("\n\n")[0]
        return [" ".join(text.split()) for text in section.split("error: ")[1:]]

    @property
    def json(self) -> Any:
        """The document that it printed."""
        return json.loads(self.out)


def run(*words: object) -> Done:
    """Run ``torchturbo plan`` in this process."""
    from torchturbo.cli.main import main

    logging.getLogger("torchturbo").handlers.clear()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(["plan", *map(str, words)])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """Return a function that runs the command in a folder of the test's own, on 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model folders: ``dense`` and ``moe`` with weights, ``config`` without."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save(folder / "dense", "qwen3", num_hidden_layers=3)
    tiny.save(folder / "moe", "qwen3_moe", num_hidden_layers=3)
    tiny.model("llama").config.save_pretrained(folder / "config")
    return folder
