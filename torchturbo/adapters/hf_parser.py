"""Options of dataclasses, read by Transformers' parser: all problems at once, and no exit."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser

from torchturbo.errors import Problem


class ArgumentError(Exception):
    """What argparse found, without its exit."""


class ReportingParser(HfArgumentParser):  # type: ignore[misc]
    """Refuses abbreviations, and reports instead of printing the usage of two hundred options and exiting."""

    def __init__(self, kinds: Iterable[type], **options: Any) -> None:
        classes: Any = tuple(kinds)  # transformers' own type takes no class
        super().__init__(classes, allow_abbrev=False, add_help=False, exit_on_error=False, **options)

    def error(self, message: str) -> Any:
        """Raise what argparse would end the program for."""
        raise ArgumentError(message)


def parse_all(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Parse, taking each option out that argparse stumbles over, until nothing is left to stumble over.

    Returns what was read by name, the words that no option took, and a problem for each option that was taken out.
    """
    problems: list[Problem] = []
    argv = list(argv)
    while True:
        try:
            namespace, rest = parser.parse_known_args(argv)
            return vars(namespace), rest, problems
        except argparse.ArgumentError as error:
            options = (error.argument_name or "").split("/")
            problems.append(Problem(options[0], "", one_line(error.message)))
            shorter = _without(argv, options, parser)
            if len(shorter) == len(argv):
                return {}, [], problems
            argv = shorter
        except ArgumentError as error:
            problems.append(Problem("", "", one_line(error)))
            return {}, [], problems


def _without(argv: list[str], options: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command line without an option and the words that it takes."""
    action = parser._option_string_actions[options[0]]
    kept, take = [], 0
    for word in argv:
        if word.startswith("-"):
            take = 0
            if word.partition("=")[0] in options:
                take = len(argv) if action.nargs == "+" else int("=" not in word)
                continue
        elif take:
            take -= 1
            continue
        kept.append(word)
    return kept


def one_line(error: object) -> str:
    """Return what an error says with its line breaks and runs of blanks as single blanks."""
    return " ".join(str(error).split())
