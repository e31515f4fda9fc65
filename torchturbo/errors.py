"""What is wrong with a configuration or a run: one line a problem, all of them at once, exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

DEBUG = "TORCHTURBO_DEBUG"
"""Variable that adds tracebacks when it is 1."""
BAD_INPUT = 2
"""Exit status for what the user can mend."""
INTERRUPTED = 130
"""Exit status that a shell reports for a program that Ctrl-C ended."""

SHOWN = 60
"""Characters that an error shows of a name or a value."""


class Problem(NamedTuple):
    """One thing that is wrong, as the person who wrote it needs to hear it."""

    place: str
    """Where it stands: ``turbo.yaml:4:12``, the name of a variable, an option; empty where there is no such place."""
    key: str
    """Dotted path of the configuration key, or empty."""
    message: str
    """What was expected and what was found."""
    remedy: str = ""
    """What to do about it, or empty."""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.place, self.key, self.message) if part)
        return printable(f"{text}; {self.remedy}" if self.remedy else text)


class ConfigError(SystemExit):
    """Problems that end the program with status 2.

    Uncaught it ends the process without a traceback, so the problems are printed when it is raised by
    :func:`fail`; code that wants to handle them reads ``problems``.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(BAD_INPUT)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class Diverged(Exception):
    """A run whose loss is no number any more: every later step and what it would save is lost."""


def fail(problems: Iterable[Problem]) -> NoReturn:
    """Print every problem on stderr, once per node, and raise :class:`ConfigError`."""
    error = ConfigError(problems)
    if is_first_local_rank():
        if debugging():
            import traceback

            traceback.print_stack(file=sys.stderr)
        print_errors(map(str, error.problems))
    raise error


def print_errors(lines: Iterable[str]) -> None:
    """Print lines on stderr as errors, in one write: the lines of several ranks must not mix."""
    prefix = "\033[1;31merror:\033[0m" if wants_colour(sys.stderr) else "error:"
    print("".join(f"{prefix} {line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def debugging() -> bool:
    """Return whether a developer asked for tracebacks."""
    return os.environ.get(DEBUG) == "1"


def is_first_local_rank() -> bool:
    """Return whether this process speaks for its node (torchrun numbers the processes of a node by LOCAL_RANK)."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return not rank.isdigit() or int(rank) == 0


def printable(text: str) -> str:
    """Return a text with line ends and control characters as escapes, so that it is one line of any terminal."""
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in text)


def shorten(text: str, most: int = SHOWN) -> str:
    """Return a text that fits into one line of an error."""
    return text if len(text) <= most else text[:most] + "..."


def some(names: Iterable[str]) -> str:
    """Return the first three of many names, as an error lists them."""
    listed = list(names)
    return f"{', '.join(listed[:3])}{', ...' if len(listed) > 3 else ''}"


def wants_colour(stream: object) -> bool:
    """Return whether a stream is a terminal whose user wants colour (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())
