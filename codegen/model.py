"""The schema as one model, which all generators read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchturbo.config.keys import Key, Rule, Section

Schema = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The schema as one model: sections, keys in the schema's order, inputs in the order of the public table."""

    schema: Schema
    sections: tuple[Section, ...]
    keys: tuple[Key, ...]
    rules: tuple[Rule, ...]
    positions: dict[str, int]
    """Place of a key or section in the public table, by path."""

    @cached_property
    def by_path(self) -> dict[str, Key]:
        """Keys by their path."""
        return {key.path: key for key in self.keys}

    @cached_property
    def flag_prefix(self) -> str:
        """What every command line option of ours begins with."""
        return _common_prefix([key.cli for key in self.keys if key.cli])

    @cached_property
    def variable_prefix(self) -> str:
        """What every environment variable of ours begins with."""
        return _common_prefix([key.env for key in self.keys if key.env])

    @property
    def help_flag(self) -> str:
        """The one option that is no key."""
        return f"{self.flag_prefix}help"

    @property
    def specs(self) -> list[Key | Section]:
        """The inputs that the public table lists: those that something other than a file can set."""
        return [item for item in self.inputs if isinstance(item, Section) or item.arg or item.cli or item.env]

    @property
    def inputs(self) -> list[Key | Section]:
        """Keys and whole sections in the order of the public table; what has no position follows in the schema's."""
        listed: list[Key | Section] = [key for key in self.keys if not key.launch_only]
        listed += [section for section in self.sections if section.arg]
        return sorted(listed, key=lambda item: self.positions.get(item.path, 10**6))


def _common_prefix(names: list[str]) -> str:
    """Return everything up to the last underscore that all names share."""
    first, last = min(names), max(names)
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: first[:length].rindex("_") + 1]
