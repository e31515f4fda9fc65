"""The ``torchturbo`` command: which words go to which sub-command, and how a run of it ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from torchturbo.errors import BAD_INPUT, DEBUG, INTERRUPTED, ConfigError, debugging, is_first_local_rank, print_errors

BROKEN_PIPE = 141

# Each takes the words behind its name. They are imported when they run: help and configuration need no torch.
COMMANDS = {
    "train": "torchturbo.cli.train",
    "plan": "torchturbo.cli.plan",
    "llamafactory": "torchturbo.cli.llamafactory",
    "quickstart": "torchturbo.cli.quickstart",
    "config": "torchturbo.cli.config",
    "doctor": "torchturbo.cli.doctor",
    "completion": "torchturbo.cli.completion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0, 1 for a check that failed, 2 for bad input, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or locale that lacks a character gets its escape
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(words)
    except ConfigError:
        return BAD_INPUT  # its lines are printed
    except KeyboardInterrupt:
        if is_first_local_rank():
            print("\ntorchturbo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `torchturbo config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debugging():
            raise
        print_errors([f"{type(error).__name__}: {error}; set {DEBUG}=1 to see where it happened"])
        return 1


def _dispatch(words: list[str]) -> int:
    if words and words[0] in COMMANDS:
        run: Callable[[list[str]], int] = import_module(COMMANDS[words[0]]).run
        status = run(words[1:])
        if sys.stdout is not None:  # it was closed before the start
            sys.stdout.flush()  # here, so that a closed pipe is met inside main()
        return status
    from torchturbo import __version__
    from torchturbo.cli.parser import build_parser
    from torchturbo.generated.keys import FLAG_PREFIX, KEYS

    help_flag = f"{FLAG_PREFIX}help"
    if words[:1] == [help_flag]:
        from torchturbo.engine.args import help_text

        print(help_text(), end="")
        return 0
    parser = build_parser(KEYS.values(), help_flag)
    if parser.parse_args(words).version:
        print(f"torchturbo {__version__}")
        return 0
    parser.print_help()
    return BAD_INPUT if words else 0
