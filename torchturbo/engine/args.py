"""The public way from a command line to arguments: parse, keep for the process, look at the table of inputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchturbo.config.commandline import read_command_line
from torchturbo.config.layers import Reading
from torchturbo.config.specs import TurboArgSpec, as_python, parse_log_level, string_to_bool
from torchturbo.errors import Problem, fail
from torchturbo.generated.args import TorchTurboArgs
from torchturbo.generated.keys import KEYS

__all__ = [
    "TorchTurboArgs",
    "TurboArgSpec",
    "get_arg_specs",
    "get_torchturbo_args",
    "parse_log_level",
    "parse_torchturbo_args",
    "set_torchturbo_args",
    "string_to_bool",
]


def parse_torchturbo_args(argv: Sequence[str] | None = None) -> tuple[TorchTurboArgs, list[str]]:
    """Take TorchTurbo's options off a command line.

    Parameters
    ----------
    argv
        Words of the command line without the program's name; None reads ``sys.argv[1:]``.

    Returns
    -------
    tuple
        The options as :class:`TorchTurboArgs`, and every other word in its order, for the framework.
        File and environment are not in the arguments; ``build_from_args`` adds them.

    Raises
    ------
    ConfigError
        With everything that is wrong on the line and, if something is, in file and environment too. It is a
        ``SystemExit`` with code 2; its lines have been printed on stderr once per node.
    SystemExit
        With code 0 after the help option.
    """
    line = read_command_line(sys.argv[1:] if argv is None else argv)
    if line.wants_help:
        print(help_text(), end="")
        raise SystemExit(0)
    if line.reading.problems:
        fail(_all_problems(line.reading))
    return _fill(line.reading), line.rest


def set_torchturbo_args(args: TorchTurboArgs | None) -> None:
    """Keep arguments for the whole process; None forgets them."""
    global _process_args
    _process_args = args


def get_torchturbo_args() -> TorchTurboArgs | None:
    """Return the arguments kept for the process, or None."""
    return _process_args


def get_arg_specs() -> tuple[TurboArgSpec, ...]:
    """Return every input of TorchTurbo, in the order of its public table."""
    from torchturbo.generated.specs import ARG_SPECS

    return ARG_SPECS


def help_text() -> str:
    """Return the help of all options."""
    import torchturbo.generated

    # Not pathlib, whose import takes longer than the rest of the help.
    path = os.path.join(os.path.dirname(torchturbo.generated.__file__), "help.txt")
    with open(path, encoding="utf-8") as file:
        return file.read()


_process_args: TorchTurboArgs | None = None


def _fill(reading: Reading) -> TorchTurboArgs:
    args = TorchTurboArgs()
    for path, setting in reading.settings.items():
        key = KEYS[path]
        if key.arg:
            value = as_python(key, setting.value)
            setattr(args, key.arg, list(value) if key.action == "append" else value)
        if not key.runtime and key.cli:
            args.config_overrides[key.cli.removeprefix("--")] = setting.value
    args.launch_options = {path: said.value for path, said in reading.settings.items() if KEYS[path].launch_only}
    args.warnings = tuple(reading.warnings)
    return args


def _all_problems(command_line: Reading) -> list[Problem]:
    from torchturbo.config.merge import merge
    from torchturbo.config.sources import read_layers

    setting = command_line.settings.get("config_path")
    return merge(read_layers(command_line, setting.value if setting else None)).problems
