"""The task: a support ticket becomes one line of JSON; its rows, and when an answer counts as right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

TRAIN = "tickets_train.jsonl"
HELD_OUT = "tickets_heldout.jsonl"
TYPES = ("account", "billing", "bug", "shipping")
KEYS = {"type", "about"}


class Row(NamedTuple):
    """One ticket with its instruction and the answer that is wanted."""

    system: str
    ticket: str
    answer: str

    @property
    def type(self) -> str:
        """Return the ticket's type."""
        return str(json.loads(self.answer)["type"])

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Return the messages that the model answers."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.ticket}]


class Score(NamedTuple):
    """How many answers hold."""

    rows: int
    valid: int
    """One line of JSON with exactly the keys ``type`` and ``about``."""
    right_type: int
    """Valid, and of the type that was wanted."""


def data_text(name: str) -> str:
    """Return one of the shipped JSONL files, :data:`TRAIN` or :data:`HELD_OUT`."""
    return (files("torchturbo.quickstart") / "data" / name).read_text(encoding="utf-8")


def read_rows(name: str) -> list[Row]:
    """Return the rows of a shipped file."""
    messages = [json.loads(line)["messages"] for line in data_text(name).splitlines()]
    return [Row(*(message["content"] for message in three)) for three in messages]


def parse_answer(text: str) -> dict[str, str] | None:
    """Return an answer as type and subject, or None unless it is one line of JSON with just these two texts."""
    text = text.strip()
    if "\n" in text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != KEYS:
        return None
    return found if all(isinstance(value, str) and value.strip() for value in found.values()) else None


def score(rows: Sequence[Row], answers: Sequence[str]) -> Score:
    """Count the answers that are valid, and those that have the right type as well."""
    found = [parse_answer(answer) for answer in answers]
    right = [one is not None and one["type"] == row.type for row, one in zip(rows, found, strict=True)]
    return Score(len(rows), sum(one is not None for one in found), sum(right))
