"""The guide's commands print what the guide shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guide_models
import pytest

import torchturbo

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text("utf-8")
SHOWN = re.findall(r"```sh\ntorchturbo plan (.*?)```\n\n```text\n(.*?)```", GUIDE, re.S)


def test_there_is_something_to_check() -> None:
    """One example without a model, three with one."""
    assert 4 == len(SHOWN)


@pytest.mark.parametrize("at", range(len(SHOWN)))
def test_a_command_of_the_guide_prints_what_it_shows(plan: Callable[..., Any], at: int) -> None:
    """Line by line; a line of dots stands for any number of lines."""
    guide_models.save(Path())
    words, text = SHOWN[at]
    done = plan(*shlex.split(words.replace("\\\n", " ")))
    assert (0, "") == (done.status, done.err)
    lines = text.replace("torchturbo 0.1.0", f"torchturbo {torchturbo.__version__}").splitlines(keepends=True)
    pattern = "".join("(?:.*\n)*?" if line == "…\n" else re.escape(line) for line in lines)
    assert re.fullmatch(pattern, done.out), done.out
