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
    from torchturbo.parallel.batch import BatchPlan

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
STEP_SIZE = "micro_batches_per_step"
"""Fact: micro-batches of one optimizer step, over all data-parallel ranks. Where it is the same, so are the samples."""
STEP_PARTS = ("gbs", "world_size", "gradient_accumulation_steps")
"""What it follows from; another mesh may make the same of others."""
DATA_FACTS = (
    *DATA_ARGUMENTS, *STEP_PARTS, STEP_SIZE, "data_parallel_ranks", "length_group_rows",
    "dataset", "dataset_tokens", "cutoff_len", "packing",
)  # fmt: skip
"""Facts that decide which samples a step sees."""
ANY_ORDER = ("random", "sequential")
"""Sampling strategies whose order does not depend on the number of ranks."""


def run_facts(args: Any, plan: BatchPlan, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resumed run must share with this one, as JSON values."""
    facts: dict[str, Any] = {"world_size": plan.world_size, STEP_SIZE: plan.gbs}
    strategy = _plain(getattr(args, "train_sampling_strategy", "random"))
    by_length = strategy == "group_by_length" or bool(getattr(args, "group_by_length", False))
    if by_length:  # Transformers sorts within groups of a multiple of this
        facts["length_group_rows"] = plan.micro_batch * plan.accumulation
    if bool(getattr(args, "dataloader_drop_last", False)) or not (by_length or strategy in ANY_ORDER):
        facts["data_parallel_ranks"] = plan.dp_size  # what does not fill a round of them is dropped
    facts |= {name: _plain(getattr(args, name)) for name in STRICT_ARGUMENTS if hasattr(args, name)}
    return facts | {name: _plain(value) for name, value in extra.items()}


def exports_each(config: EngineConfig) -> bool:
    """Return whether each checkpoint holds the model as ``from_pretrained`` reads it, too."""
    return config.checkpoint.hf_export == "every"


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
