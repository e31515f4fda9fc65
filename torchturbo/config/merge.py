"""Merge the layers: precedence, provenance, rules between keys, and settings that nothing will read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torchturbo.config.keys import Key, Rule, shown
from torchturbo.config.layers import Layer, Origin, Reading, Setting
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS
from torchturbo.generated.validator import broken_rules

DEFAULT = Origin(Layer.DEFAULT, "")


class Merged(NamedTuple):
    """The effective settings and everything there is to say about them."""

    settings: dict[str, Setting]
    """Every key of the schema by its path, in the schema's order."""
    history: dict[str, list[Setting]]
    """What each layer said of a key, lowest first; keys that no layer set are missing."""
    problems: list[Problem]
    warnings: list[Problem]

    @property
    def values(self) -> dict[str, Any]:
        """Effective values by path."""
        return {path: setting.value for path, setting in self.settings.items()}

    @property
    def changed(self) -> list[Setting]:
        """Settings whose value is not the schema's default, in the schema's order."""
        return [setting for path, setting in self.settings.items() if setting.value != KEYS[path].default]


def merge(readings: Iterable[Reading]) -> Merged:
    """Return the effective settings of some layers, whatever order they come in."""
    history: dict[str, list[Setting]] = {}
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for reading in sorted(readings, key=lambda reading: reading.layer):
        problems += reading.problems
        warnings += reading.warnings
        for path, setting in reading.settings.items():
            history.setdefault(path, []).append(setting)
    settings = {
        path: history[path][-1] if path in history else Setting(path, key.default, DEFAULT)
        for path, key in KEYS.items()
    }
    merged = Merged(settings, history, problems, warnings)
    values = merged.values
    problems += [_broken(rule, settings) for rule in broken_rules(values)]
    idle = idle_paths(values)
    warnings += [_idle(setting, values) for path, setting in settings.items() if path in idle and _was_meant(setting)]
    return merged


def overridden(merged: Merged) -> list[tuple[Setting, Setting]]:
    """Return what the framework was told and a layer of ours overrode with another value, each with its winner."""
    pairs = []
    for path, said in merged.history.items():
        winner = merged.settings[path]
        if said[0].origin.layer is Layer.FRAMEWORK and winner.value != said[0].value:
            pairs.append((said[0], winner))
    return pairs


_FLIPPED: dict[str, str] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _broken(rule: Rule, settings: Mapping[str, Setting]) -> Problem:
    """Report a broken rule at the side that was said last, which is the one to look at first."""
    culprit, other = settings[rule.left], settings[rule.right]
    op: str = rule.op
    if other.origin.layer > culprit.origin.layer:
        culprit, other, op = other, culprit, _FLIPPED[op]
    message = f"expected {op} {other.path} ({shown(other.value)}, {other.origin}), got {shown(culprit.value)}"
    return Problem(culprit.origin.place, culprit.path, message, rule.text[0].lower() + rule.text[1:].rstrip("."))


def idle_paths(values: Mapping[str, Any]) -> set[str]:
    """Return the keys that other keys' values keep from being read."""
    return {
        path
        for path, key in KEYS.items()
        if any(not condition.holds(values[condition.path]) for condition in key.active_when)
    }


def _was_meant(setting: Setting) -> bool:
    """Return whether somebody set a key with a value that it is worth telling him will not be read."""
    return setting.origin.layer > Layer.FRAMEWORK and setting.value not in KEYS[setting.path].idle_silent


def _idle(setting: Setting, values: Mapping[str, Any]) -> Problem:
    key: Key = KEYS[setting.path]
    missing = [condition for condition in key.active_when if not condition.holds(values[condition.path])]
    switch = " and ".join(map(str, missing))
    now = ", ".join(f"{condition.path} is {shown(values[condition.path])}" for condition in missing)
    return Problem(setting.origin.place, key.path, f"set but not read ({now})", f"it is read when {switch}")
