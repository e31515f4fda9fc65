"""Sparse layers: what each source said, value by value, with its place."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from torchturbo.config import scalars
from torchturbo.config.keys import Alias, Key
from torchturbo.config.scalars import Written
from torchturbo.errors import Problem, shorten
from torchturbo.generated.validator import CHECKS


class Layer(IntEnum):
    """Sources in the order of precedence; a later one wins."""

    DEFAULT = 0
    FRAMEWORK = 1
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4

    @property
    def label(self) -> str:
        """The layer's name for people."""
        return self.name.lower().replace("_", " ")


class Origin(NamedTuple):
    """Where a value comes from."""

    layer: Layer
    place: str
    """``turbo.yaml:4:12``, ``--bf16``, the name of an option or a variable; empty for a default."""

    def __str__(self) -> str:
        return self.place or self.layer.label


class Setting(NamedTuple):
    """One value that one source gave to one key."""

    path: str
    value: Any
    origin: Origin


class Reading:
    """What one source said: its settings by path, and what is wrong or worth a warning."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.settings: dict[str, Setting] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self._spelling: dict[str, str] = {}
        self._replaced: dict[str, str] = {}

    def take(self, key: Key, written: Written, place: str, *, spelling: str = "", alias: Alias | None = None) -> None:
        """Read a scalar by its key's type and keep it, or report what is wrong with it.

        ``spelling`` is the name it was given under, ``alias`` the annotation if that name is a former one.
        """
        if not self._named_once(key, place, spelling, alias):
            return
        value = scalars.read(key, written)
        appended = key.action == "append"
        expected = CHECKS[key.path]([value] if appended else value)
        if expected:
            message = f"expected {expected}, got {scalars.found(written, value)}"
            self.problems.append(Problem(place, self._name(key), message, scalars.remedy(key, written)))
            return
        before = self.settings.get(key.path)
        if appended:
            value = (*(before.value if before else ()), value)
        self.settings[key.path] = Setting(key.path, value, Origin(self.layer, place))

    def take_value(self, key: Key, value: Any, place: str) -> None:
        """Keep a Python value that code gave, or report what is wrong with it."""
        expected = CHECKS[key.path](value)
        if expected:
            message = f"expected {expected}, got {scalars.json_type(value)} {shorten(repr(value))}"
            self.problems.append(Problem(place, self._name(key), message))
            return
        self.settings[key.path] = Setting(key.path, scalars.normal(key, value), Origin(self.layer, place))

    def _named_once(self, key: Key, place: str, spelling: str, alias: Alias | None) -> bool:
        """Warn of former names; refuse a key that one source names both ways."""
        other = self._spelling.setdefault(key.path, spelling)
        if other != spelling:
            message = f"given twice, as {other} and as its former name" if alias else f"given twice, also as {other}"
            self.problems.append(Problem(place, self._name(key), message, "keep the new name"))
            return False
        if alias is not None:
            new = {Layer.FILE: key.path, Layer.ENVIRONMENT: key.env}.get(self.layer, key.cli) or key.path
            message = f"renamed to {new} in {alias.since}; the former name is read until {alias.removal}"
            self._warn(Problem(place, spelling if self.layer is Layer.FILE else "", message))
        if key.deprecated is None:
            return self._alone(key, place, self._replaced.get(key.path), key.path)
        successor = key.deprecated.successor
        message = f"deprecated since {key.deprecated.since}, goes away in {key.deprecated.removal}"
        self._warn(Problem(place, self._name(key), message, f"use {successor}" if successor else ""))
        if successor is None:
            return True
        self._replaced[successor] = key.path
        return self._alone(key, place, successor if successor in self.settings else None, successor)

    def _alone(self, key: Key, place: str, other: str | None, newer: str) -> bool:
        """Refuse a key that one source gives together with the one that replaces it."""
        if other is None:
            return True
        message = f"given together with {other}, and one replaces the other"
        self.problems.append(Problem(place, self._name(key), message, f"keep {newer}"))
        return False

    def _warn(self, warning: Problem) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _name(self, key: Key) -> str:
        # On a command line and in the environment the place already is the key's name.
        return "" if self.layer in (Layer.ENVIRONMENT, Layer.COMMAND_LINE) else key.path


def former_names(keys: Mapping[str, Key], kind: str) -> dict[str, tuple[Key, Alias]]:
    """Return the former paths, flags or variables (``kind``: ``path``, ``cli``, ``env``) and the keys they mean."""
    return {
        getattr(alias, kind): (key, alias) for key in keys.values() for alias in key.aliases if getattr(alias, kind)
    }
