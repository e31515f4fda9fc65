"""From the words behind ``torchturbo llamafactory`` to arguments and configuration: torch is not needed yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.adapters import base
from torchturbo.adapters.llama_factory.mapping import framework_values
from torchturbo.adapters.llama_factory.package import missing_package
from torchturbo.adapters.llama_factory.refusals import key_clashes, nothing_to_do, refusals
from torchturbo.adapters.llama_factory.said import Arguments, Said, read_arguments
from torchturbo.config.commandline import read_command_line
from torchturbo.config.merge import merge
from torchturbo.config.sources import read_layers
from torchturbo.engine.args import TorchTurboArgs, parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.config import EngineConfig, merge_args

if TYPE_CHECKING:
    from torchturbo.errors import Problem


class Command(NamedTuple):
    """One launch, read and checked as far as that goes without LLaMA-Factory."""

    arguments: Arguments
    config: EngineConfig


def read_command(words: Sequence[str]) -> Command:
    """Read a command line; everything that can be wrong by now is told at once, in less than a second.

    Raises
    ------
    ConfigError
        With every problem; its lines are printed.
    """
    line = read_command_line(words)
    if line.wants_help:
        parse_torchturbo_args(words)  # prints it and leaves
    named = line.reading.settings.get("config_path")
    path = named.value if named else None
    missing = missing_package()
    arguments = read_arguments(line.rest)
    values, contradictions = framework_values(arguments.said)
    problems: list[Problem] = [*arguments.problems, *refusals(arguments.said), *contradictions]
    problems += [*base.environment_clashes(), *nothing_to_do(arguments.said), *([missing] if missing else [])]
    merged = merge(read_layers(line.reading, path, values))
    if problems or merged.problems or key_clashes(arguments.said, merged.settings):
        from torchturbo.plugins.load import file_problems

        problems += file_problems(merged.values.get("plugins", ()))
    config = _checked(merged, problems, arguments.said)
    set_torchturbo_args(parse_torchturbo_args(words)[0])
    return Command(arguments, config)


def build_config_from_lf_args(
    model_args: Any,
    data_args: Any,
    training_args: Any,
    finetuning_args: Any,
    generating_args: Any = None,
    *,
    args: TorchTurboArgs | None = None,
    said: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Return the configuration of a launch whose framework layer is what the user told LLaMA-Factory.

    Parameters
    ----------
    model_args, data_args, training_args, finetuning_args, generating_args
        The dataclasses that LLaMA-Factory's ``get_train_args`` returns.
    args
        TorchTurbo's options; None takes those of the process.
    said
        What the user wrote, by LLaMA-Factory's names, as in the mapping of its YAML file. Without it what differs
        from the dataclasses' defaults counts as said; a default that was written out can't be told from them.
    environ
        Environment to read; None reads the process's own.

    Raises
    ------
    ConfigError
        With every problem: of each layer, of second owners, of keys that have no feature yet.
    """
    holders = (model_args, data_args, training_args, finetuning_args, generating_args)
    told = _differing(holders) if said is None else _placed(said, holders)
    values, problems = framework_values(told)
    problems += [*refusals(told), *base.environment_clashes()]
    return _checked(merge_args(args, framework=values, environ=environ), problems, told)


def _checked(merged: Any, problems: Sequence[Problem], said: Mapping[str, Said]) -> EngineConfig:
    return base.checked_config(merged, [*problems, *key_clashes(said, merged.settings)])


def _differing(holders: Sequence[Any]) -> dict[str, Said]:
    from torchturbo.adapters.hf_arguments import said_values

    return {
        name: Said(value, f"{type(held).__name__}.{name}")
        for held in holders
        if held is not None
        for name, value in said_values(held).items()
    }


def _placed(said: Mapping[str, Any], holders: Sequence[Any]) -> dict[str, Said]:
    names = {field: type(held).__name__ for held in holders if held is not None for field in vars(held)}
    return {name: Said(value, f"{names[name]}.{name}" if name in names else name) for name, value in said.items()}
