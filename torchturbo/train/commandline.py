"""From a command line to arguments and configuration, with every problem of every source reported together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import CHECKPOINTING_NAMES, clashes, framework_values
from torchturbo.config.commandline import CommandLine, read_command_line
from torchturbo.config.merge import merge
from torchturbo.config.sources import read_layers
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.config.merge import Merged
    from torchturbo.engine.config import EngineConfig
    from torchturbo.train.arguments import Parsed

LIBRARIES = ("torch", "transformers", "accelerate")
TAKEN_OVER = ("bf16", "full_determinism", *CHECKPOINTING_NAMES, *(f"{name}_kwargs" for name in CHECKPOINTING_NAMES))
"""Training arguments that become the engine's; the Trainer never sees them."""


class MissingLibrary(ModuleNotFoundError):
    """A library that training needs is not installed."""


class Command(NamedTuple):
    """One launch, read and checked as far as no file but the configuration is needed."""

    parsed: Parsed
    config: EngineConfig
    accumulation: int | None
    """Accumulation steps that were typed, or None."""


def read_command(argv: Sequence[str]) -> Command:
    """Read a command line; everything that is wrong with it, and with the files it names, is told at once."""
    line = read_command_line(argv)
    if (line.reading.problems and missing_library()) or line.wants_help:
        parse_torchturbo_args(argv)  # tells what it can without the framework
    found = read_everything(line)
    config = base.checked_config(found.merged, found.problems)
    set_torchturbo_args(parse_torchturbo_args(argv)[0])
    kept = {name: value for name, value in found.said.items() if name not in TAKEN_OVER}
    return Command(found.parsed._replace(training=kept), config, found.said.get("gradient_accumulation_steps"))


class Everything(NamedTuple):
    """A command line as far as it can be read, and what is wrong with it."""

    parsed: Parsed
    said: dict[str, Any]
    """The training arguments that were typed."""
    merged: Merged
    problems: list[Problem]
    """All but the merged layers' own."""


def read_everything(line: CommandLine, *, complete: bool = True) -> Everything:
    """Read a command line, whatever is wrong with it; one that need not be ``complete`` may name no model and no data.

    Raises
    ------
    MissingLibrary
        If training has a library missing.

    """
    if name := missing_library():
        raise MissingLibrary(name, name=name)
    from torchturbo.train.arguments import REQUIRED, parse_framework  # torch and transformers: seconds

    parsed, problems = parse_framework(line.rest, required=REQUIRED if complete else ())
    said: dict[str, Any] = dict(parsed.training)
    problems += _load_kwargs(said) + base.environment_clashes() + clashes(said, typed=True)
    named = line.reading.settings.get("config_path")
    merged = merge(read_layers(line.reading, named.value if named else None, framework_values(said, typed=True)))
    from torchturbo.train.paths import path_problems, unusable_paths

    if problems or merged.problems or unusable_paths(parsed):
        from torchturbo.plugins.load import file_problems

        problems += path_problems(parsed) + file_problems(merged.values.get("plugins", ()))
    return Everything(parsed, said, merged, problems)


def missing_library() -> str | None:
    """Return a library that training needs and that is not installed, without importing any."""
    for name in LIBRARIES:
        try:
            if find_spec(name) is None:
                return name
        except (ModuleNotFoundError, ValueError):
            return name
    return None


def _load_kwargs(said: dict[str, Any]) -> list[Problem]:
    """Read the checkpointing options that are typed as JSON, in place."""
    problems = []
    for name in (f"{switch}_kwargs" for switch in CHECKPOINTING_NAMES):
        if isinstance(value := said.get(name), str):
            try:
                said[name] = json.loads(value)
            except ValueError:
                said.pop(name)
                problems.append(Problem(f"--{name}", "", f"expected a JSON object, got {value!r}"))
    return problems
