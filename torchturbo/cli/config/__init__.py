"""``torchturbo config ACTION``: one module an action."""

from __future__ import annotations

from importlib import import_module

from torchturbo.cli.parser import build_parser
from torchturbo.config.commandline import CommandLine, read_command_line
from torchturbo.generated.keys import FLAG_PREFIX, KEYS

HELP_FLAG = f"{FLAG_PREFIX}help"
WITH_OPTIONS = ("show", "explain")


def run(words: list[str]) -> int:
    """Run the action that the first word names."""
    rest = words
    line = None
    if words[:1] and words[0] in WITH_OPTIONS:
        line, rest = _take_options(words)
        if line.wants_help:
            from torchturbo.engine.args import help_text

            print(help_text(), end="")
            return 0
    options = build_parser(KEYS.values(), HELP_FLAG).parse_args(["config", *rest])
    action = import_module(f"{__name__}.{options.action}")
    status: int = action.run(options, line.reading) if line else action.run(options)
    return status


def _take_options(words: list[str]) -> tuple[CommandLine, list[str]]:
    """Take our options off; where ``explain`` is left without a key, the first option is the one to explain."""
    line = read_command_line(words)
    asked = words[1:2]
    if words[0] == "explain" and line.rest == words[:1] and asked and asked[0] != HELP_FLAG:
        line = read_command_line([words[0], *words[2:]])
        # Handed on without its dashes, which argparse would take for an option's.
        return line, [*line.rest, asked[0].partition("=")[0].lstrip("-")]
    return line, line.rest
