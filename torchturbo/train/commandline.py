"""From a command line to arguments and configuration, with every problem of every source reported together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import CHECKPOINTING_NAMES, clashes, framework_values
from torchturbo.config.commandline import read_command_line
from torchturbo.engine.args import TorchTurboArgs, parse_torchturbo_args, set_torchturbo_args
from torchturbo.errors import ConfigError, Problem, fail

if TYPE_CHECKING:
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
    """Read a command line; TorchTurbo's own problems are printed before the framework's libraries are imported."""
    own: ConfigError | None = None
    try:
        args, rest = parse_torchturbo_args(argv)
    except ConfigError as error:
        own, args, rest = error, TorchTurboArgs(), read_command_line(argv).rest

    if name := missing_library():
        if own is not None:
            raise own
        raise MissingLibrary(name, name=name)
    from torchturbo.train.arguments import parse_framework  # torch and transformers: seconds

    problems: list[Problem] = []
    parsed = None
    try:
        parsed = parse_framework(rest)
    except ConfigError as error:
        problems += error.problems
    said: dict[str, Any] = dict(parsed.training) if parsed else {}
    problems += _load_kwargs(said) + base.environment_clashes()
    if own is not None:
        if problems:
            fail(problems)
        raise own
    problems += clashes(said, typed=True)
    config = base.build_config(args, framework_values(said, typed=True), problems)
    assert parsed is not None  # build_config raised its problems
    set_torchturbo_args(args)
    kept = {name: value for name, value in said.items() if name not in TAKEN_OVER}
    return Command(parsed._replace(training=kept), config, said.get("gradient_accumulation_steps"))


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
