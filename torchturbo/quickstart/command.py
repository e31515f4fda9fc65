"""The training command: the arguments that the quickstart trains with, and how this user can type them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchturbo.generated.keys import KEYS
from torchturbo.quickstart.output import Output

ROWS_PER_STEP = 4
LEARNING_RATE = "2e-4"


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    output_dir: Path
    steps: int
    seed: int


def recipe(options: Options) -> dict[str, str]:
    """Return the training framework's options that shape the result."""
    return {
        "--max_steps": str(options.steps),
        "--per_device_train_batch_size": str(ROWS_PER_STEP),
        "--learning_rate": LEARNING_RATE,
        "--lr_scheduler_type": "linear",
        "--seed": str(options.seed),
    }


def train_arguments(options: Options, output: Output, model: Path, model_dir: str = "") -> list[str]:
    """Return what follows ``torchturbo train`` in the command that this run is equal to.

    Args:
        options: steps and seed.
        output: where configuration and tickets are.
        model: folder of the model to start from.
        model_dir: folder within the output's for another trained model than the run's own.
    """
    named = {
        KEYS["config_path"].cli or "": shown_path(output.config),
        "--model_name_or_path": str(model),
        "--dataset": shown_path(output.train_rows),
        "--output_dir": shown_path(output.folder / model_dir if model_dir else output.model),
        **recipe(options),
        "--logging_steps": "1",
        "--save_strategy": "no",
        "--report_to": "none",
    }
    from torchturbo.runtime import current_runtime  # brings in torch

    if current_runtime().device_type == "cpu":  # Trainer would take a device that the engine has no runtime for
        named["--use_cpu"] = "true"
    return [word for pair in named.items() for word in pair]


def command_lines(command: Sequence[str], width: int) -> list[str]:
    """Return a command as lines for a POSIX shell, broken before options, each option beside its value."""
    first = next((index for index, word in enumerate(command) if word.startswith("--")), len(command))
    pieces = [shlex.join(command[:first])]
    pieces += [shlex.join(command[index : index + 2]) for index in range(first, len(command), 2)]
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 1 + len(piece) > width:
            lines.append(f"  {piece}")
        else:
            lines[-1] += f" {piece}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def program(started_as: str | None = None, executable: str | None = None) -> list[str]:
    """Return what this user types for ``torchturbo``: its path where no folder of PATH has it, or ``python -m``."""
    started_as = sys.argv[0] if started_as is None else started_as
    executable = sys.executable if executable is None else executable
    script = Path(started_as)
    if script.name == "__main__.py" and script.parent.name == "torchturbo":
        return [_typed("python", executable), "-m", "torchturbo"]
    return [_typed("torchturbo", started_as) if script.stem == "torchturbo" else "torchturbo"]


def _typed(name: str, path: str) -> str:
    found = shutil.which(name)
    return name if found and os.path.abspath(found) == os.path.abspath(path) else shown_path(Path(path))


def shown_path(path: Path) -> str:
    """Return a path relative to the working folder if it lies in there, else in full."""
    path = Path(os.path.abspath(path))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
