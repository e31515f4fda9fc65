"""The record of a run: its effective configuration and a manifest of what decides data order and schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchturbo.checkpoint.files import write_text
from torchturbo.checkpoint.fingerprints import fingerprints

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

CONFIG_NAME = "torchturbo.yaml"
MANIFEST_NAME = "torchturbo_run.json"

SCHEDULE_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "max_steps",
    "num_train_epochs",
)
DATA_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "data_seed",
    "dataloader_drop_last",
    "group_by_length",
    "train_sampling_strategy",
)
OPTIMIZER_ARGUMENTS = (
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
)
STRICT_ARGUMENTS = (*SCHEDULE_ARGUMENTS, *DATA_ARGUMENTS, *OPTIMIZER_ARGUMENTS)
"""Training arguments that decide which samples a step sees or how the optimizer moves; absent ones are left out."""
DATA_FACTS = (*DATA_ARGUMENTS, "world_size", "gbs", "dataset", "dataset_tokens", "cutoff_len", "packing")
"""Facts that decide which samples a step sees."""


def run_facts(args: Any, world_size: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resumed run must share with this one, as JSON values."""
    facts: dict[str, Any] = {"world_size": world_size}
    facts |= {name: _plain(getattr(args, name)) for name in STRICT_ARGUMENTS if hasattr(args, name)}
    return facts | {name: _plain(value) for name, value in extra.items()}


def write_record(folder: Path, config: EngineConfig, facts: Mapping[str, Any], step: int) -> None:
    """Write the effective configuration and the manifest into a folder; the files there get their fingerprints."""
    from torchturbo.engine.dump import to_yaml

    write_text(folder / CONFIG_NAME, to_yaml(config))
    manifest = {"step": step, "run": dict(facts), "files": fingerprints(folder), "versions": versions()}
    write_text(folder / MANIFEST_NAME, json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a recorded run; None where the folder has none that can be read."""
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a recorded run; None where the folder has no readable manifest."""
    facts = (read_manifest(folder) or {}).get("run")
    return facts if isinstance(facts, dict) else None


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that computed the run."""
    found: dict[str, str] = {}
    for name in ("torchturbo", "torch", "transformers", "accelerate", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that is not installed
            continue
    return found


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back, so that a written and a fresh record compare equal."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(getattr(value, "value", value))
