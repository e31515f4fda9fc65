"""Read every layer of a launch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.config.environment import read_environment
from torchturbo.config.keys import shown
from torchturbo.config.layers import Layer, Reading
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS

if TYPE_CHECKING:
    from torchturbo.generated.args import TorchTurboArgs


class FrameworkValue(NamedTuple):
    """Something that the user told the framework and that means one of our keys."""

    path: str
    value: Any
    place: str
    """``--bf16`` or ``TrainingArguments.bf16``."""


def read_layers(
    command_line: Reading,
    config_path: str | None,
    framework: Sequence[FrameworkValue] = (),
    environ: Mapping[str, str] | None = None,
) -> list[Reading]:
    """Return the readings of a launch: framework, file where one is named, environment, command line."""
    readings = [_read_framework(framework)]
    if config_path is not None:
        from torchturbo.config.file import read_file  # brings in the YAML parser

        readings.append(read_file(config_path))
    readings.append(read_environment(os.environ if environ is None else environ))
    readings.append(command_line)
    return readings


def read_args(args: TorchTurboArgs) -> Reading:
    """Return the command-line layer that is held in flat arguments.

    Options that were given are in ``config_overrides``. A field that differs from what they say was set by code
    after parsing, or on an instance that was never parsed, and counts as much as an option.
    """
    reading = Reading(Layer.COMMAND_LINE)
    for key in KEYS.values():
        name = key.cli.removeprefix("--") if key.cli else None
        if name in args.config_overrides:
            reading.take_value(key, args.config_overrides[name], key.cli or "")
        if key.arg is None:
            continue
        said = args.config_overrides.get(name, key.arg_default) if name else key.arg_default
        value = getattr(args, key.arg)
        value = getattr(value, "name", value)  # a LogLevel
        if key.action == "append":
            value, said = tuple(value), tuple(said or ())
        if value == said:
            continue
        if value is None and not key.nullable:  # set back to "not specified"
            reading.settings.pop(key.path, None)
        else:
            place = key.cli if key.runtime and key.cli else f"TorchTurboArgs.{key.arg}"
            reading.take_value(key, value, place)
    for path, value in args.launch_options.items():
        reading.take_value(KEYS[path], value, KEYS[path].cli or "")
    reading.warnings += args.warnings
    _read_sections(args, reading)
    _read_strays(args, reading)
    return reading


def _read_sections(args: TorchTurboArgs, reading: Reading) -> None:
    """Read sections that are held whole; a leaf's own option has precedence over them."""
    from torchturbo.generated.keys import SECTIONS

    for section in SECTIONS.values():
        if section.arg is None:
            continue
        held = getattr(args, section.arg)
        for name in section.names:
            key = KEYS[f"{section.path}.{name}"]
            value = getattr(held, name, key.default)
            if value != key.default and key.path not in reading.settings:
                reading.take_value(key, value, f"TorchTurboArgs.{section.arg}.{name}")


def _read_strays(args: TorchTurboArgs, reading: Reading) -> None:
    known = {key.cli.removeprefix("--") for key in KEYS.values() if key.cli}
    for name in args.config_overrides:
        if name not in known:
            message = f"unknown option in config_overrides, with value {shown(args.config_overrides[name])}"
            reading.problems.append(Problem(f"TorchTurboArgs.config_overrides[{name!r}]", "", message))


def _read_framework(values: Sequence[FrameworkValue]) -> Reading:
    reading = Reading(Layer.FRAMEWORK)
    for said in values:
        reading.take_value(KEYS[said.path], said.value, said.place)
    return reading
