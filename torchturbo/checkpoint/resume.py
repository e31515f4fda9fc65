"""Resuming: which checkpoint is meant, and what of the new run differs from the recorded one."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchturbo.checkpoint.damage import STATE_NAME, damage
from torchturbo.checkpoint.files import recover
from torchturbo.checkpoint.layout import is_native
from torchturbo.checkpoint.record import (
    CONFIG_NAME,
    DATA_FACTS,
    MANIFEST_NAME,
    SCHEDULE_ARGUMENTS,
    STEP_PARTS,
    STEP_SIZE,
    read_facts,
)
from torchturbo.config.keys import shown
from torchturbo.config.names import did_you_mean
from torchturbo.errors import ConfigError, Problem
from torchturbo.generated.keys import KEYS
from torchturbo.logging import get_logger
from torchturbo.parallel.agree import from_first, is_first

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

log = get_logger(__name__)

NEWEST = ("true", "True", "last", "latest")
"""Words that ask for the newest complete checkpoint instead of naming one."""
CONSEQUENCES: Mapping[str, tuple[str, ...]] = {
    "gradient_accumulation_steps": ("gbs", "world_size"),
    STEP_SIZE: STEP_PARTS,
    "data_seed": ("seed",),
    "dataset_tokens": ("dataset", "cutoff_len", "train_on_prompt"),
}
"""Facts that follow from others: where one of those differs too, that one is the difference to tell of."""
WARNED = "plugin_code"
"""Fact whose difference is told and stops nothing: a plugin's code changes with each of its comments."""
TRAINED = ("mtp.loss_scaling_factor", "dspark.loss_scaling_factor", "dspark.enabled")
"""What, at 0 or off, takes heads out of training; between other values it may differ."""
NEVER_ALLOWED = (
    "optim",
    "optim_args",
    "optimizer.name",
    "mtp.enabled",
    *TRAINED,
    "freeze_policy.vision_tower",
    "freeze_policy.multi_modal_projector",
    "freeze_policy.language_model",
)
"""What the optimizer's saved state is made for: no other state continues it."""

OBJECTIVES = (
    "mtp.loss_scaling_factor",
    "dspark.loss_scaling_factor",
    "dspark.num_anchors",
    "dspark.loss_decay_gamma",
    "dspark.ce_loss_alpha",
    "dspark.l1_loss_alpha",
    "dspark.confidence_loss_alpha",
    "moe.aux_loss_coeff",
    "moe.z_loss_coeff",
    "diffusion.cap_lambda",
)
"""What a run's losses are made of. It may differ, as schedules of such weights need it, and is told."""


@functools.cache
def resume_flag() -> str:
    """Return the option that allows a difference on resume."""
    return str(KEYS["resume_allow"].cli)


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first, with or without what a resume needs."""
    found = []
    for folder in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / STATE_NAME).is_file():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def find_checkpoint(wanted: str | bool, output_dir: Path, place: str) -> Path | Problem:
    """Return the checkpoint folder that a user means, or what is wrong with it."""
    if wanted is True or wanted in NEWEST:
        for newest in reversed(checkpoints(output_dir)):
            if (broken := damage(newest)) is None:
                return newest
            log.warning_rank0("%s is passed over: %s", newest, broken[0])
        return Problem(place, "", f"no complete checkpoint in {output_dir}", "start without it")
    folder = Path(str(wanted)).expanduser()
    if (folder / STATE_NAME).is_file():
        broken = damage(folder)
        return Problem(place, "", f"{folder}: {broken[0]}", broken[1]) if broken else folder
    what = f"no {STATE_NAME} in it" if folder.is_dir() else "there is no such folder"
    near = ", ".join(str(path) for path in (checkpoints(folder) or checkpoints(output_dir))[-3:])
    return Problem(place, "", f"{folder} is no checkpoint: {what}", f"use one of {near}" if near else "")


def agreed_checkpoint(wanted: str | bool, output_dir: Path, place: str) -> Path | Problem:
    """Return the checkpoint that all ranks resume from, or what is wrong with it on this one. A collective.

    The first rank puts back what a killed run had moved away, and looks; ranks that looked by themselves could find
    different ones. The others see whether they can read that one: a problem of one rank is for the caller to raise on
    all of them (:func:`torchturbo.parallel.agree.together`).
    """

    def look() -> Path | Problem:
        recover(output_dir)
        return find_checkpoint(wanted, output_dir, place)

    found = from_first("looking for the checkpoint", look)
    if isinstance(found, Problem) or is_first():
        return found
    if not (found / STATE_NAME).is_file():
        return Problem(place, "", f"{found} is not there", "keep output_dir in a folder that all ranks share")
    broken = damage(found)
    return Problem(place, "", f"{found}: {broken[0]}", broken[1]) if broken else found


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
    if not has_record(folder):
        return [], []
    saved = read_facts(folder)
    if saved is None or not (folder / CONFIG_NAME).read_text(encoding="utf-8", errors="replace").strip():
        name = MANIFEST_NAME if saved is None else CONFIG_NAME
        damaged = Problem(
            str(folder / name), "", "can't be read, so that the runs can't be compared", "use another one"
        )
        return [damaged], []
    recorded = _recorded(folder)
    changes = _config_changes(recorded, config) | _trained_changes(recorded, config) | _fact_changes(saved, facts)
    if STEP_SIZE in saved and saved[STEP_SIZE] == facts.get(STEP_SIZE):  # another mesh, the same steps
        changes = {name: pair for name, pair in changes.items() if name not in STEP_PARTS}
    changes = {name: pair for name, pair in changes.items() if not changes.keys() & set(CONSEQUENCES.get(name, ()))}
    before, after = changes.pop(WARNED, ({}, {}))
    if other := sorted(name for name in before.keys() & after.keys() if before[name] != after[name]):
        log.warning_rank0("%s was made with other code of the plugins %s", folder, ", ".join(other))
    allowed = allowed_changes(config) - set(NEVER_ALLOWED)
    problems = [
        Problem(
            str(folder),
            name,
            f"the checkpoint was made with {_words(before)}, this run has {_words(after)}: {_effect(name)}",
            "use the old value" + ("" if name in NEVER_ALLOWED else f", or {allow_flag} {name}"),
        )
        for name, (before, after) in changes.items()
        if name not in allowed
    ]
    known = {*facts, *_strict_keys()}
    for name in sorted(allowed - known):
        message = f"{name!r} is nothing that a resume compares"
        problems.append(Problem(allow_flag, "", message, did_you_mean(name, known, limit=2)))
    return problems, sorted(allowed & changes.keys())


def format_problem(folder: Path, sharded: bool) -> Problem | None:
    """Return a problem where a sharded run would resume from a checkpoint that holds whole tensors in pickles."""
    if not sharded or is_native(folder):
        return None
    message = "it was saved whole, by one process of Trainer, and a sharded run reads its shards from native/"
    remedy = "resume in one process without cpu_offload and save once, or start from it: --model_name_or_path"
    return Problem(str(folder), "", message, remedy)


def has_record(folder: Path) -> bool:
    """Return whether a checkpoint says how it was made."""
    return (folder / MANIFEST_NAME).is_file() and (folder / CONFIG_NAME).is_file()


def _strict_keys() -> list[str]:
    from torchturbo.generated.keys import KEYS

    return [path for path, key in KEYS.items() if key.strict_on_resume]


def tell_objectives(folder: Path, config: EngineConfig) -> None:
    """Log a line for each number of the losses that a recorded run had another one of: its key, and both."""
    recorded = _recorded(folder)
    for path in OBJECTIVES:
        before, after = recorded.resolved(path), config.resolved(path)
        if before != after:
            text = "resuming with another %s: %s in the checkpoint's run, %s in this one; the loss is another one"
            log.warning_rank0(text, path, shown(before), shown(after))


def _trained_changes(recorded: EngineConfig, config: EngineConfig) -> dict[str, tuple[Any, Any]]:
    """Return which keys take heads out of training, or into it: the optimizer's saved state is for what was trained.

    Only where both runs have heads; without, those keys do nothing.
    """
    if not (recorded.get("mtp.enabled") and config.get("mtp.enabled")):
        return {}
    pairs = {path: (recorded.resolved(path), config.resolved(path)) for path in TRAINED}
    return {path: pair for path, pair in pairs.items() if bool(pair[0]) != bool(pair[1])}


def _recorded(folder: Path) -> EngineConfig:
    """Return the configuration of the run that made a checkpoint."""
    from torchturbo.config.file import read_file
    from torchturbo.config.merge import merge
    from torchturbo.engine.config import config_of

    merged = merge([read_file(str(folder / CONFIG_NAME))])
    if merged.problems:
        raise ConfigError(merged.problems)
    return config_of(merged)


def _config_changes(recorded: EngineConfig, config: EngineConfig) -> dict[str, tuple[Any, Any]]:
    pairs = {path: (recorded.get(path), config.get(path)) for path in _strict_keys()}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _fact_changes(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (saved[name], facts[name])
        for name in saved
        if name in facts and _contents(saved[name]) != _contents(facts[name])
    }


def _contents(value: Any) -> Any:
    """Return what of a fact counts: files are what is in them, not their names."""
    if isinstance(value, list):
        return [{**item, "name": ""} if isinstance(item, dict) and "sha256" in item else item for item in value]
    return value


def _words(value: Any) -> str:
    """Return a value as a user writes it; files as their names, with what tells equal names apart."""
    if value == []:
        return "none"
    if isinstance(value, list) and all(isinstance(item, dict) and "sha256" in item for item in value):
        return ", ".join(f"{file['name']} ({file['rows']} rows, sha256 {file['sha256'][:8]})" for file in value)
    return shown(value)


def _effect(name: str) -> str:
    """Say in words what a difference would do to the run, since nothing else would show it."""
    if name in TRAINED:
        return "other parameters would be trained than the optimizer's state is of"
    if name in SCHEDULE_ARGUMENTS:
        return "the learning-rate schedule would jump"
    if name in DATA_FACTS:
        return "samples would be skipped or seen twice"
    return "the run would not continue as it began"
