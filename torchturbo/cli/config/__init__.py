"""``torchturbo config ACTION``: one module an action."""

from __future__ import annotations

import argparse
from importlib import import_module

from torchturbo.cli.parser import build_parser
from torchturbo.config.commandline import read_command_line
from torchturbo.generated.keys import FLAG_PREFIX, KEYS

HELP_FLAG = f"{FLAG_PREFIX}help"
WITH_OPTIONS = ("show", "explain")


def run(words: list[str]) -> int:
    """Run the action that the first word names."""
    rest = words
    line = None
    if words[:1] and words[0] in WITH_OPTIONS:
        line = read_command_line(words)
        if line.wants_help:
            from torchturbo.engine.args import help_text

            print(help_text(), end="")
            return 0
        rest = line.rest
    options: argparse.Namespace = build_parser(KEYS.values(), HELP_FLAG).parse_args(["config", *rest])
    action = import_module(f"{__name__}.{options.action}")
    status: int = action.run(options, line.reading) if line else action.run(options)
    return status
