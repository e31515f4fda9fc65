"""What the tests of the command share: an empty folder for each, and a way to run a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from torchturbo.cli.main import main


class Done(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def torchturbo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Return a function that runs the command in this process, in a folder of the test's own, 100 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("TORCHTURBO_DEBUG", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def run(*words: str) -> Done:
        try:
            status = main(words)
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return Done(status, out, err)

    return run
