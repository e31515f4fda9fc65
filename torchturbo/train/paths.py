"""Paths of a command line: names that can't be used, files and folders that are none, a folder that can't be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchturbo.checkpoint.resume import checkpoints
from torchturbo.errors import Problem, shorten
from torchturbo.train.arguments import Parsed
from torchturbo.train.model import folder_problem
from torchturbo.train.rows import path_problem


def path_problems(parsed: Parsed) -> list[Problem]:
    """Return what is wrong with the paths of a command line, looking no deeper than that they are there."""
    unusable = unusable_paths(parsed)
    places = {problem.place for problem in unusable}
    problems: list[Problem | None] = []
    if parsed.model.model_name_or_path and "--model_name_or_path" not in places:
        problems.append(folder_problem(parsed.model.model_name_or_path))
    for option, paths in (("--dataset", parsed.data.dataset), ("--eval_dataset", parsed.data.eval_dataset)):
        if option not in places:
            problems += [path_problem(Path(path).expanduser(), option) for path in paths]
    if (output_dir := parsed.training.get("output_dir")) and "--output_dir" not in places:
        problems += output_problems(Path(str(output_dir)).expanduser(), may_hold_checkpoints=True)
    return [*unusable, *(problem for problem in problems if problem is not None)]


def unusable_paths(parsed: Parsed) -> list[Problem]:
    """Return a problem for each path that the operating system itself refuses, whatever is or is not there."""
    return [problem for place, text in _paths(parsed) if (problem := _unusable(place, text)) is not None]


def _paths(parsed: Parsed) -> Iterator[tuple[str, str]]:
    named = {
        "--model_name_or_path": parsed.model.model_name_or_path,
        "--tokenizer_name": parsed.model.tokenizer_name,
        "--chat_template": parsed.model.chat_template,
        "--output_dir": parsed.training.get("output_dir"),
        "--resume_from_checkpoint": parsed.training.get("resume_from_checkpoint"),
    }
    yield from ((place, text) for place, text in named.items() if isinstance(text, str))
    yield from (("--dataset", text) for text in parsed.data.dataset)
    yield from (("--eval_dataset", text) for text in parsed.data.eval_dataset)


def _unusable(place: str, text: str) -> Problem | None:
    try:
        os.stat(Path(text).expanduser())
    except (FileNotFoundError, NotADirectoryError):
        return None  # its own check says what is missing
    except OSError as error:
        return Problem(place, "", f"{shorten(text)} can't be used: {error.strerror or error}")
    except RuntimeError:  # pathlib found no such user
        return Problem(place, "", f"{shorten(text)} begins with a user who has no home folder", "write the path out")
    return None


def output_problems(folder: Path, may_hold_checkpoints: bool) -> list[Problem]:
    """Return what keeps a run from writing to a folder."""
    place = "--output_dir"
    if folder.is_symlink() and not folder.exists():
        return [Problem(place, "", f"{folder} is a link that leads nowhere")]
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return [Problem(place, "", f"{nearest} is a file, expected a folder")]
    try:  # permissions say little of a file system that is full, read-only, or takes no files
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return [Problem(place, "", f"{nearest} can't be written to: {error.strerror or error}")]
    if not may_hold_checkpoints and (old := checkpoints(folder)):
        message = f"{folder} holds {old[-1].name} of an earlier run"
        remedy = "go on with --resume_from_checkpoint true, or use another folder, or --overwrite_output_dir true"
        return [Problem(place, "", message, remedy)]
    return []
