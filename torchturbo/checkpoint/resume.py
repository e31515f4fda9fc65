"""Resuming: which checkpoint is meant, and what of the new run differs from the recorded one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchturbo.checkpoint.record import CONFIG_NAME, MANIFEST_NAME, read_facts
from torchturbo.config.keys import shown
from torchturbo.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

STATE_NAME = "trainer_state.json"
NEWEST = ("true", "True", "last", "latest")
"""Words that ask for the newest complete checkpoint instead of naming one."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = []
    for folder in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / STATE_NAME).is_file():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def find_checkpoint(wanted: str | bool, output_dir: Path, place: str) -> Path | Problem:
    """Return the checkpoint folder that a user means, or what is wrong with it."""
    if wanted is True or wanted in NEWEST:
        found = checkpoints(output_dir)
        return found[-1] if found else Problem(place, "", f"no complete checkpoint in {output_dir}", "leave it away")
    folder = Path(str(wanted)).expanduser()
    if (folder / STATE_NAME).is_file():
        return folder
    what = f"no {STATE_NAME} in it" if folder.is_dir() else "there is no such folder"
    near = ", ".join(str(path) for path in (checkpoints(folder) or checkpoints(output_dir))[-3:])
    return Problem(place, "", f"{folder} is no checkpoint: {what}", f"use one of {near}" if near else "")


def allowed_changes(config: EngineConfig) -> frozenset[str]:
    """Return the names that a user allows to differ from the recorded run."""
    return frozenset(config.runtime.resume_allow)


def resume_problems(
    folder: Path, config: EngineConfig, facts: Mapping[str, Any], allow_flag: str
) -> tuple[list[Problem], list[str]]:
    """Compare a recorded run with the new one.

    Returns the problems (differences nobody allowed, allowed names that do not exist) and the names of the
    differences that were allowed. A checkpoint without a record gives neither: see :func:`has_record`.
    """
    changes = _config_changes(folder, config) | _fact_changes(read_facts(folder) or {}, facts)
    allowed = allowed_changes(config)
    problems = [
        Problem(
            str(folder),
            name,
            f"the checkpoint was made with {_words(before)}, this run has {_words(after)}: {_effect(name)}",
            f"use the old value, or {allow_flag} {name}",
        )
        for name, (before, after) in changes.items()
        if name not in allowed
    ]
    known = {*facts, *_strict_keys()}
    for name in sorted(allowed - known):
        near = difflib.get_close_matches(name, known, n=2)
        problems.append(
            Problem(
                allow_flag,
                "",
                f"{name!r} is nothing that a resume compares",
                f"did you mean {' or '.join(near)}?" if near else "",
            )
        )
    return problems, sorted(allowed & changes.keys())


def has_record(folder: Path) -> bool:
    """Return whether a checkpoint says how it was made."""
    return (folder / MANIFEST_NAME).is_file() and (folder / CONFIG_NAME).is_file()


def _strict_keys() -> list[str]:
    from torchturbo.generated.keys import KEYS

    return [path for path, key in KEYS.items() if key.strict_on_resume]


def _config_changes(folder: Path, config: EngineConfig) -> dict[str, tuple[Any, Any]]:
    from torchturbo.config.file import read_file
    from torchturbo.config.merge import merge
    from torchturbo.engine.config import config_of

    if not (folder / CONFIG_NAME).is_file():
        return {}
    merged = merge([read_file(str(folder / CONFIG_NAME))])
    if merged.problems:
        raise ConfigError(merged.problems)
    saved = config_of(merged)
    pairs = {path: (saved.get(path), config.get(path)) for path in _strict_keys()}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _fact_changes(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (saved[name], facts[name]) for name in saved if name in facts and saved[name] != facts[name]}


def _words(value: Any) -> str:
    """Return a value as a user writes it; files as their names, with what tells equal names apart."""
    if isinstance(value, list) and all(isinstance(item, dict) and "sha256" in item for item in value):
        return ", ".join(f"{file['name']} ({file['rows']} rows, sha256 {file['sha256'][:8]})" for file in value)
    return shown(value)


def _effect(name: str) -> str:
    """Say in words what a difference would do to the run, since nothing else would show it."""
    if name in ("learning_rate", "max_steps", "num_train_epochs") or name.startswith(("lr_", "warmup")):
        return "the learning-rate schedule would jump"
    if name in ("world_size", "seed", "data_seed", "dataset", "packing", "cutoff_len") or "batch" in name:
        return "samples would be skipped or seen twice"
    if name in ("gbs", "gradient_accumulation_steps"):
        return "samples would be skipped or seen twice"
    return "the run would not continue as it began"
