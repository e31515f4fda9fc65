"""``torchturbo train``: exit statuses, interrupts and errors around a training run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from torchturbo.errors import (
    DEBUG,
    INTERRUPTED,
    ConfigError,
    Diverged,
    Problem,
    debugging,
    fail,
    is_first_local_rank,
    print_errors,
)
from torchturbo.train.commandline import MissingLibrary, read_command

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "DistBackendError")
"""Words of a collective whose other side is gone."""


def run(argv: list[str]) -> int:
    """Train as the command line says; see :func:`outcome` for what is returned."""
    return _help() if asks_for_help(argv) else outcome(lambda: _train(argv))


def _train(argv: list[str]) -> None:
    try:
        command = read_command(argv)
        from torchturbo.train.run import run_command
    except MissingLibrary as error:
        fail([Problem("", "", f"{error.name} is not installed", "pip install 'torchturbo[train]'")])
    run_command(command)


def outcome(train: Callable[[], None]) -> int:
    """Run a training and return its exit status, with a line for whatever went wrong.

    Returns
    -------
    int
        0 after a finished run, 2 for bad input (every problem printed), 130 after Ctrl-C, 1 for anything else.

    """
    try:
        train()
    except ConfigError as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        if is_first_local_rank():
            print("\ninterrupted; the last checkpoint is as it was", file=sys.stderr)
        return INTERRUPTED
    except Diverged as error:  # on every rank alike
        if is_first_local_rank():
            print_errors([str(error)])
        return 1
    except Exception as error:
        _report(error)
        return 1
    _leave_group()
    return 0


def asks_for_help(argv: list[str]) -> bool:
    """Return whether a word before ``--`` asks for help."""
    return any(word in ("-h", "--help") for word in (argv[: argv.index("--")] if "--" in argv else argv))


def _help() -> int:
    from torchturbo.engine.args import help_text
    from torchturbo.train.arguments import framework_help

    print(framework_help())
    print(help_text(), end="")
    return 0


def _report(error: Exception) -> None:
    """Print an unexpected error on one line, on the rank that met it; the traceback is for developers."""
    if debugging():
        traceback.print_exception(error)
    rank = os.environ.get("RANK", "")
    where = f"rank {rank}: " if rank.isdecimal() and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if where and any(words in message for words in LOST_PEER):
        message = f"another rank ended, its message says why ({message})"
    print_errors([f"{where}{message}" + ("" if debugging() else f"; set {DEBUG}=1 to see where it happened")])


def _leave_group() -> None:
    """Close the process group; some backends warn at exit about one that is open."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
