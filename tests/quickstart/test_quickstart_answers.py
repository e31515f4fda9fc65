"""Answers from one batch are those that each prompt gets alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchturbo.quickstart.answers import LONGEST, ask, left_padded
from torchturbo.quickstart.convert import convert
from torchturbo.quickstart.tickets import Row

ROWS = [Row("Sort.", "x" * length, "{}") for length in (3, 40, 11)]


@pytest.fixture(scope="module")
def folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("answers") / "model"
    convert(tiny_gguf, made)
    return made


def test_prompts_end_in_the_last_column() -> None:
    ids, mask = left_padded([[5, 6, 7], [8]], pad=2)
    assert ids.tolist() == [[5, 6, 7], [2, 2, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_batch_answers_as_each_prompt_alone_and_always_the_same(folder: Path) -> None:
    together = ask(folder, ROWS)
    assert together == ask(folder, ROWS)
    assert together == [ask(folder, [row])[0] for row in ROWS]


def test_an_answer_is_the_text_after_the_prompt(folder: Path) -> None:
    for answer in ask(folder, ROWS):
        assert "Sort." not in answer
        assert "<|im_" not in answer
        assert len(answer) <= 3 * LONGEST
