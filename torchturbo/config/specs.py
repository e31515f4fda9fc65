"""The public record of one input, and the converters it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torchturbo.config.keys import Key
from torchturbo.config.values import FrozenValues
from torchturbo.logging import LogLevel

TRUE_WORDS = ("yes", "true", "t", "y", "1")
FALSE_WORDS = ("no", "false", "f", "n", "0")


@dataclass(eq=False, repr=False, frozen=True)
class TurboArgSpec(FrozenValues):
    """One input of TorchTurbo and the names under which it is reached.

    ``type`` turns text into the value (None: text stays text); it raises :class:`argparse.ArgumentTypeError`
    or :class:`ValueError`, as argparse expects. ``help`` doubles percent signs, as argparse expects too.
    """

    name: str
    config_path: str | None = None
    args_name: str | None = None
    cli_name: str | None = None
    env_name: str | None = None
    type: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    action: str | None = None
    help: str | None = None


def string_to_bool(value: str | bool) -> bool:
    """Read a boolean as Transformers does, without importing it: ten words, in any case, and nothing else.

    Raises
    ------
    argparse.ArgumentTypeError
        For any other text.
    """
    if isinstance(value, bool):
        return value
    word = value.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    pairs = ", ".join(f"{yes}/{no}" for yes, no in zip(TRUE_WORDS, FALSE_WORDS, strict=True))
    _refuse(f"expected one of {pairs} in any case, got {value!r}")


def parse_log_level(value: str | LogLevel) -> LogLevel:
    """Read a log level by its name, in any case.

    Raises
    ------
    argparse.ArgumentTypeError
        For any other text.
    """
    if isinstance(value, LogLevel):
        return value
    try:
        return LogLevel[value.strip().upper()]
    except KeyError:
        _refuse(f"expected one of {', '.join(LogLevel.__members__)}, got {value!r}")


def as_python(key: Key, value: Any) -> Any:
    """Return a value as the dataclasses hold it: the name of an enumeration's member becomes the member."""
    return LogLevel[value] if key.python else value


def _refuse(message: str) -> NoReturn:
    # Imported here: a parse that succeeds does without argparse, which is half of a cold start.
    import argparse

    raise argparse.ArgumentTypeError(message) from None
