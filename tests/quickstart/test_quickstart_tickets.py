"""The shipped tickets are sound, and the score counts what it says."""

from __future__ import annotations

import json
import re
from collections import Counter
from difflib import SequenceMatcher

import pytest

from torchturbo.quickstart import tickets
from torchturbo.quickstart.tickets import HELD_OUT, TRAIN, TYPES, Row, parse_answer, read_rows, score

BOTH = (TRAIN, HELD_OUT)


def words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text.lower())


def test_how_many() -> None:
    assert len(read_rows(TRAIN)) == 48
    assert len(read_rows(HELD_OUT)) == 12


@pytest.mark.parametrize("name", BOTH)
def test_each_line_is_one_conversation(name: str) -> None:
    for line in tickets.data_text(name).splitlines():
        row = json.loads(line)
        assert list(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert all(set(message) == {"role", "content"} for message in row["messages"])
    assert tickets.data_text(name).endswith("}\n")


@pytest.mark.parametrize("name", BOTH)
def test_each_wanted_answer_is_right_by_the_score(name: str) -> None:
    rows = read_rows(name)
    assert score(rows, [row.answer for row in rows]) == (len(rows),) * 3
    assert {row.type for row in rows} == set(TYPES)
    assert len({row.system for row in rows}) == 1


@pytest.mark.parametrize("name", BOTH)
def test_types_are_balanced(name: str) -> None:
    counts = Counter(row.type for row in read_rows(name))
    assert set(counts.values()) == {len(read_rows(name)) // len(TYPES)}


@pytest.mark.parametrize("name", BOTH)
def test_the_subject_is_in_the_ticket_and_short(name: str) -> None:
    for row in read_rows(name):
        about = words(json.loads(row.answer)["about"])
        assert 1 <= len(about) <= 4
        assert set(about) <= set(words(row.ticket)), row.ticket


def test_no_held_out_ticket_is_like_a_training_ticket() -> None:
    train = [row.ticket for row in read_rows(TRAIN)]
    assert len(set(train)) == len(train)
    for row in read_rows(HELD_OUT):
        nearest = max(train, key=lambda ticket: SequenceMatcher(None, ticket, row.ticket).ratio())
        assert SequenceMatcher(None, nearest, row.ticket).ratio() < 0.7, (nearest, row.ticket)


def test_no_personal_data() -> None:
    text = tickets.data_text(TRAIN) + tickets.data_text(HELD_OUT)
    assert not re.search(r"\S@\S|https?:|\+?\d[\d -]{6,}", text)
    assert text.isascii()


@pytest.mark.parametrize("name", BOTH)
def test_lengths_suit_a_small_machine(name: str) -> None:
    assert all(15 <= len(row.ticket) <= 80 for row in read_rows(name))
    assert all(len(row.answer) <= 70 for row in read_rows(name))


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "bug", "about": "menu"}',
        ' {"about":"menu","type":"bug"}\n',
        '{"type": "weather", "about": "snow"}',
    ],
)
def test_valid(text: str) -> None:
    assert parse_answer(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bug",
        '{"type": "bug"}',
        '{"type": "bug", "about": "menu", "more": 1}',
        '{"type": "bug", "about": ""}',
        '{"type": "bug", "about": 3}',
        '{"type": null, "about": "menu"}',
        '{\n"type": "bug", "about": "menu"}',
        'Sure! {"type": "bug", "about": "menu"}',
        '{"type": "bug", "about": "menu"} {"type": "bug", "about": "menu"}',
        '["type", "about"]',
        '{"type": "bug", "about": "me',
        "[" * 100_000,
    ],
)
def test_invalid(text: str) -> None:
    assert parse_answer(text) is None


def test_score_counts_valid_and_right() -> None:
    rows = [Row("s", "t", '{"type": "bug", "about": "menu"}')] * 4
    answers = [
        '{"type": "bug", "about": "else"}',
        '{"type": "billing", "about": "menu"}',
        "bug",
        '{"type": "BUG", "about": "menu"}',
    ]
    assert score(rows, answers) == (4, 3, 1)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        score(rows, answers[:3])
