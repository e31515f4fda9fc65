"""What every adapter does, whatever the framework: configuration, batch plan, second owners, the start-up lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torchturbo.config.keys import shown
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger, set_log_level
from torchturbo.parallel.batch import BatchPlan, accumulation_steps, batch_problem
from torchturbo.parallel.mesh import MeshPlan, is_sharded, mesh_problems

if TYPE_CHECKING:
    from torchturbo.config.merge import Merged
    from torchturbo.engine.config import EngineConfig
    from torchturbo.runtime import Runtime

log = get_logger(__name__)

SECOND_OWNERS: Mapping[str, tuple[frozenset[str], str, str]] = {
    "ACCELERATE_USE_FSDP": (frozenset({"", "false", "0"}), "accelerate would shard the model", "unset it"),
    "ACCELERATE_USE_DEEPSPEED": (frozenset({"", "false", "0"}), "DeepSpeed would own the optimizer", "unset it"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        frozenset({"", "false", "0"}),
        "accelerate would split the ranks",
        "unset it",
    ),
    "ACCELERATE_MIXED_PRECISION": (
        frozenset({"", "no"}),
        "accelerate would autocast too",
        "unset it, set mixed_precision",
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        frozenset({"", "1"}),
        "accelerate would accumulate too",
        "unset it, set gbs",
    ),
}
"""Variables by which ``accelerate launch`` switches on a second owner: (harmless values, what would happen, remedy)."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
HARMLESS = r"(?i)true|false|yes|no|on|off|fp32|fp16|bf16|fp8|[0-9]{1,9}"
"""Values of other programs' variables that an error shows."""


def environment_clashes(environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return a problem for each variable that would put another engine under the same loop, or names no rank."""
    ranks = [
        Problem(name, "", "expected a number, as torchrun sets it", "unset it, or start with torchrun")
        for name in RANK_VARIABLES
        if not re.fullmatch("-?[0-9]{1,9}|", environ.get(name, ""))
    ]
    return ranks + [
        Problem(name, "", f"{_told(environ[name])}: {effect}, which TorchTurbo does", remedy)
        for name, (harmless, effect, remedy) in SECOND_OWNERS.items()
        if environ.get(name, "").lower() not in harmless
    ]


def _told(value: str) -> str:
    """Return another program's variable as an error may show it: switches, formats and counts, no text of unknown kind."""
    return repr(value) if re.fullmatch(HARMLESS, value) else "its value"


def checked_config(merged: Merged, problems: Iterable[Problem] = ()) -> EngineConfig:
    """Return the configuration of merged layers, or refuse what can't run, all problems at once.

    ``problems`` are those the caller has found already; they are reported together with the configuration's own.
    """
    from torchturbo.engine.config import config_of

    found = [*merged.problems, *problems]
    if found:
        fail(found)
    return config_of(merged)


def device_problem(device_type: str, runtime: Runtime) -> Problem | None:
    """Return a problem where the framework computes on a kind of device that the engine has no runtime for."""
    if device_type == runtime.device_type:
        return None
    return Problem("", "", f"TorchTurbo has no runtime for {device_type} devices", "use --use_cpu, or CUDA or an NPU")


def launch_problem(world_size: int, environ: Mapping[str, str] = os.environ) -> Problem | None:
    """Return a problem where a launcher started several ranks and the framework takes each for a run of its own."""
    started = environ.get("WORLD_SIZE", "")
    if not started.isdigit() or int(started) <= 1 or world_size > 1:
        return None
    message = f"{started} ranks were started, but Transformers runs each for itself"
    return Problem("WORLD_SIZE", "", message, "on a machine without an accelerator say --use_cpu true")


def apply_log_level(config: EngineConfig) -> None:
    """Set the level of TorchTurbo's loggers."""
    set_log_level(config.runtime.log_level)


def plan_batch(config: EngineConfig, micro_batch: int, accumulation: int, world_size: int) -> BatchPlan | list[Problem]:
    """Return the batch of one optimizer step; the framework's accumulation steps hold where no gbs is set.

    What keeps the ranks from forming the groups of the configuration is returned instead, all at once.
    """
    gbs, sp_size = config.gbs, config.parallel_plan.sp_size
    problems = mesh_problems(config, world_size)
    if gbs is not None and world_size % sp_size == 0:
        problem = batch_problem(gbs, world_size, sp_size, place=config.origin("gbs").place)
        problems += [problem] if problem else []
    if problems:
        return problems
    if gbs is None:
        return BatchPlan(micro_batch, accumulation, world_size, sp_size)
    steps = accumulation_steps(gbs, world_size, sp_size)
    assert steps is not None  # batch_problem would have said so
    return BatchPlan(micro_batch, steps, world_size, sp_size)


def report_accumulation(config: EngineConfig, plan: BatchPlan, said: int | None, place: str) -> None:
    """Say once that a value the user gave the framework gives way to the global batch, with both places."""
    if said is not None and config.gbs is not None and said != plan.accumulation:
        log.warning_rank0(
            "%s %d gives way to gbs %d (%s): %d accumulation steps",
            place,
            said,
            config.gbs,
            config.origin("gbs").place,
            plan.accumulation,
        )


def describe_backend(config: EngineConfig, world_size: int) -> str:
    """Return the log line about the distributed backend: what shards the model, and over which ranks."""
    plan = MeshPlan.of(config, world_size)
    if not is_sharded(config, world_size):
        return f"backend {config.backend}: {plan}, nothing to shard"
    return f"backend {config.backend}: {plan}"


def settings_lines(config: EngineConfig) -> list[str]:
    """Return a line for each setting that somebody made, with its place."""
    return [f"{path} = {shown(value)}  ({origin.place})" for path, value, origin in config.changed()]


def announce(config: EngineConfig, plan: BatchPlan) -> None:
    """Log once what is in force: the settings somebody made and where, the batch, the backend."""
    for line in settings_lines(config):
        log.info_rank0("%s", line)
    log.info_rank0("batch: %s", plan)
    log.info_rank0("%s", describe_backend(config, plan.world_size))
