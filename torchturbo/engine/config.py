"""The engine's configuration: every key with its value and where that came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from torchturbo.config.keys import shown
from torchturbo.config.layers import Layer, Origin, Setting
from torchturbo.config.merge import Merged, merge, overridden
from torchturbo.config.sources import FrameworkValue, read_args, read_layers
from torchturbo.config.specs import as_python
from torchturbo.config.values import frozen
from torchturbo.engine.args import TorchTurboArgs, get_torchturbo_args
from torchturbo.errors import fail
from torchturbo.generated.config import SECTION_CLASSES, EngineOptions, RuntimeArgs
from torchturbo.generated.keys import KEYS
from torchturbo.logging import LogLevel, get_logger

__all__ = [
    "EngineConfig",
    "FrameworkValue",
    "Layer",
    "Origin",
    "build_from_args",
    "config_of",
    "load_config",
    "merge_args",
]


@frozen
class EngineConfig(EngineOptions):
    """The effective configuration. Two are equal when their keys are, wherever the values came from."""

    runtime: RuntimeArgs = field(default_factory=RuntimeArgs, compare=False)
    """Inputs of this launch."""
    provenance: Mapping[str, Setting] = field(default_factory=dict, compare=False, repr=False)
    """The effective setting of each key and runtime input, by path."""
    overridden: tuple[FrameworkValue, ...] = field(default=(), compare=False, repr=False)
    """What the framework was told and a layer of ours replaced."""

    def get(self, path: str) -> Any:
        """Return a value by its dotted path, or a runtime input by its name.

        Raises
        ------
        KeyError
            If the schema has no such key.
        """
        if KEYS[path].runtime:
            return getattr(self.runtime, path)
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name)
        return value

    def resolved(self, path: str) -> Any:
        """Return a value as :meth:`get` does; the key's default where it is null, which stands for it."""
        value = self.get(path)
        return KEYS[path].default if value is None else value

    def origin(self, path: str) -> Origin:
        """Return the layer and the place that a key's value comes from.

        Raises
        ------
        KeyError
            If the schema has no such key.
        """
        if path not in KEYS:
            raise KeyError(path)
        return self.provenance[path].origin if path in self.provenance else Origin(Layer.DEFAULT, "")

    def changed(self) -> list[Setting]:
        """Return the settings whose value is not the schema's default, in the schema's order."""
        values = ((path, self.get(path)) for path in KEYS)
        return [
            Setting(path, value, self.origin(path)) for path, value in values if _plain(value) != KEYS[path].default
        ]


def build_from_args(
    args: TorchTurboArgs | None = None,
    *,
    framework: Sequence[FrameworkValue] = (),
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Merge all layers of a launch into one checked configuration.

    Parameters
    ----------
    args
        Parsed arguments; None takes the process-wide ones, or none at all.
    framework
        What the user told the framework, as an adapter maps it to keys.
    environ
        Environment to read; None reads the process's own.

    Raises
    ------
    ConfigError
        With every problem of every layer.
    """
    return config_of(merge_args(args, framework=framework, environ=environ))


def merge_args(
    args: TorchTurboArgs | None = None,
    *,
    framework: Sequence[FrameworkValue] = (),
    environ: Mapping[str, str] | None = None,
) -> Merged:
    """Merge all layers of a launch as :func:`build_from_args` does, and leave the problems to the caller."""
    args = args or get_torchturbo_args() or TorchTurboArgs()
    return merge(read_layers(read_args(args), args.config_path, framework, environ))


def load_config(path: str | os.PathLike[str]) -> EngineConfig:
    """Return the configuration that a file alone describes; no environment, no command line.

    Raises
    ------
    ConfigError
        With every problem of the file.
    """
    from torchturbo.config.file import read_file

    return config_of(merge([read_file(os.fspath(path))]))


def config_of(merged: Merged) -> EngineConfig:
    """Return the configuration that merged layers describe, and say what they deserve a warning for.

    Raises
    ------
    ConfigError
        With every problem.
    """
    if merged.problems:
        fail(merged.problems)
    replaced = overridden(merged)
    runtime, sections = _sorted_values(merged)
    if runtime["log_level"] <= LogLevel.WARNING:  # what this launch asked for; the logger's own level is set later
        _warn(merged, replaced)
    return EngineConfig(
        **sections,
        runtime=RuntimeArgs(**runtime),
        provenance=merged.settings,
        overridden=tuple(FrameworkValue(said.path, said.value, said.origin.place) for said, _ in replaced),
    )


def _warn(merged: Merged, replaced: Sequence[tuple[Setting, Setting]]) -> None:
    logger = get_logger()
    for warning in merged.warnings:
        logger.warning_rank0("%s", warning)
    for said, winner in replaced:
        asked, sets = shown(said.value), shown(winner.value)
        text = "%s: %s asked the framework for %s; %s sets %s, which holds"
        logger.warning_rank0(text, said.path, said.origin.place, asked, winner.origin, sets)


def _sorted_values(merged: Merged) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the runtime inputs, and the root's keys with each section built."""
    runtime: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {path: {} for path in SECTION_CLASSES}
    for path, setting in merged.settings.items():
        key = KEYS[path]
        section, _, name = path.rpartition(".")
        if not key.runtime:
            fields[section][name] = setting.value
        else:
            value = as_python(key, setting.value)
            runtime[path] = tuple(value) if key.type == "array" else value
    for path in sorted(filter(None, SECTION_CLASSES), key=lambda path: -path.count(".")):
        parent, _, name = path.rpartition(".")
        fields[parent][name] = SECTION_CLASSES[path](**fields[path])
    return runtime, fields[""]


def _plain(value: Any) -> Any:
    """Return a value as the schema writes it."""
    if isinstance(value, LogLevel):
        return value.name
    return list(value) if isinstance(value, tuple) else value
