"""The order in which the engine works on a model, as data, and which configuration key each step consumes.

Add a step: a function ``(model, config, context)`` in a module of its own under ``torchturbo/engine/steps/``, and one
row below in its place of the order freeze, extra heads, ops, losses, objectives, mesh, sequence, experts, activation
checkpointing, shard, prefetch. Add an observer: a function ``(config)`` that returns a plugin, or None where its keys do
not ask for one. Every key of the schema is claimed by one row, which a test holds: none is accepted and ignored.
This module imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Plugin


class Step(NamedTuple):
    """One step, or one place of the launch, and the keys that it alone consumes."""

    name: str
    function: str
    """``package.module:function``, imported when it is run."""
    keys: tuple[str, ...] = ()
    """Dotted paths of the configuration keys it reads (runtime inputs by their bare name)."""
    check: str = ""
    """Function of the same arguments that returns problems and looks at no weight: it also gets a model on meta."""
    undo: str = ""
    """Function ``(model)`` that takes out of a model what the step put in; one it did nothing to it leaves alone."""

    def load(self) -> Any:
        """Import and return the function."""
        return _imported(self.function)


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


STEPS: tuple[Step, ...] = (
    Step(
        "plugins: model built",
        "torchturbo.engine.steps.plugins:model_built",
        check="torchturbo.engine.steps.plugins:check",
    ),
    Step("determinism", "torchturbo.engine.steps.determinism:apply", ("use_deterministic_algorithms",)),
    Step(
        "freeze",
        "torchturbo.engine.steps.freeze:apply",
        ("freeze_policy.vision_tower", "freeze_policy.multi_modal_projector", "freeze_policy.language_model"),
        check="torchturbo.engine.steps.freeze:check",
        undo="torchturbo.engine.steps.freeze:undo",
    ),
    Step(
        "extra heads",
        "torchturbo.engine.steps.heads:apply",
        ("mtp.enabled",),
        check="torchturbo.engine.steps.heads:check",
        undo="torchturbo.engine.steps.heads:undo",
    ),
    Step(
        "precision",
        "torchturbo.engine.steps.precision:apply",
        ("mixed_precision",),
        check="torchturbo.engine.steps.precision:check",
    ),
    Step(
        "ops",
        "torchturbo.engine.steps.ops:apply",
        ("ops.policy",),
        check="torchturbo.engine.steps.ops:check",
        undo="torchturbo.engine.steps.ops:undo",
    ),
    Step(
        "losses",
        "torchturbo.engine.steps.losses:apply",
        ("loss_chunk.enabled", "loss_chunk.chunk_size"),
        check="torchturbo.engine.steps.losses:check",
        undo="torchturbo.engine.steps.losses:undo",
    ),
    Step(
        "block diffusion",
        "torchturbo.engine.steps.diffusion:apply",
        ("diffusion.cap_lambda", "diffusion.bd_mask_low", "diffusion.bd_mask_high", "diffusion.bd_block_size"),
        check="torchturbo.engine.steps.diffusion:check",
        undo="torchturbo.engine.steps.diffusion:undo",
    ),
    Step(
        "multi-token prediction",
        "torchturbo.engine.steps.mtp:apply",
        ("mtp.loss_scaling_factor", "mtp.log_loss"),
        check="torchturbo.engine.steps.mtp:check",
        undo="torchturbo.engine.steps.mtp:undo",
    ),
    Step(
        "DSpark",
        "torchturbo.engine.steps.dspark:apply",
        (
            "dspark.enabled",
            "dspark.loss_scaling_factor",
            "dspark.num_anchors",
            "dspark.loss_decay_gamma",
            "dspark.ce_loss_alpha",
            "dspark.l1_loss_alpha",
            "dspark.confidence_loss_alpha",
        ),
        check="torchturbo.engine.steps.dspark:check",
        undo="torchturbo.engine.steps.dspark:undo",
    ),
    Step(
        "router losses",
        "torchturbo.engine.steps.routers:apply",
        ("moe.aux_loss_coeff", "moe.z_loss_coeff"),
        check="torchturbo.engine.steps.routers:check",
        undo="torchturbo.engine.steps.routers:undo",
    ),
    Step("mesh", "torchturbo.engine.steps.mesh:apply"),
    Step(
        "sequence",
        "torchturbo.engine.steps.sequence:apply",
        ("parallel_plan.sp_size",),
        check="torchturbo.engine.steps.sequence:check",
        undo="torchturbo.engine.steps.sequence:undo",
    ),
    Step(
        "experts",
        "torchturbo.engine.steps.experts:apply",
        ("parallel_plan.ep_size", "moe.token_dispatcher"),
        check="torchturbo.engine.steps.experts:check",
        undo="torchturbo.engine.steps.experts:undo",
    ),
    Step(
        "activation checkpointing",
        "torchturbo.engine.steps.activation_checkpointing:apply",
        ("activation_checkpointing.enabled", "activation_checkpointing.use_reentrant"),
        check="torchturbo.engine.steps.activation_checkpointing:check",
        undo="torchturbo.engine.steps.activation_checkpointing:undo",
    ),
    Step("plugins: before shard", "torchturbo.engine.steps.plugins:before_shard"),
    Step(
        "shard",
        "torchturbo.engine.steps.shard:apply",
        ("backend_config.reshard_after_forward",),
        check="torchturbo.engine.steps.shard:check",
    ),
    Step(
        "prefetch",
        "torchturbo.engine.steps.prefetch:apply",
        (
            "backend_config.prefetch_strategy",
            "backend_config.prefetch_direction",
            "backend_config.forward_prefetch_depth",
            "backend_config.backward_prefetch_depth",
        ),
        undo="torchturbo.engine.steps.prefetch:undo",
    ),
)
"""What is done to a model, in this order."""

LAUNCH: tuple[Step, ...] = (
    Step("configuration", "torchturbo.engine.config:build_from_args", ("config_path",)),
    Step("logging", "torchturbo.adapters.base:apply_log_level", ("log_level",)),
    Step("batch", "torchturbo.adapters.base:plan_batch", ("gbs",)),
    Step("backend", "torchturbo.adapters.base:describe_backend", ("backend",)),
    Step("optimizer", "torchturbo.adapters.hf_optimizer:make_optimizer", ("optimizer.name",)),
    Step(
        "cpu offload",
        "torchturbo.engine.backends.fsdp2.offload:offloaded",
        (
            "backend_config.cpu_offload.enabled",
            "backend_config.cpu_offload.mode",
            "backend_config.cpu_offload.optimizer_memory_fraction",
        ),
    ),
    Step("checkpoints", "torchturbo.checkpoint.record:exports_each", ("checkpoint.hf_export",)),
    Step("resume", "torchturbo.checkpoint.resume:allowed_changes", ("resume_allow",)),
    Step("plugins", "torchturbo.plugins.load:load_plugins", ("plugins",)),
)
"""What consumes a key before or beside the model."""

OBSERVERS: tuple[Step, ...] = (
    Step("unused parameters", "torchturbo.observe.unused:observer"),
    Step("memory snapshot", "torchturbo.observe.memory:from_config", ("memory_snapshot_steps",)),
    Step("meter", "torchturbo.observe.mfu:from_config", ("mfu.enabled", "mfu.card")),
    Step("profiler", "torchturbo.observe.profile:from_config", ("profiling",)),
)
"""What watches a run: each function takes the configuration and returns a plugin, or None."""


def apply(model: Any, config: EngineConfig, context: Any) -> None:
    """Run every step on a model, in order."""
    for step in STEPS:
        step.load()(model, config, context)


def problems(model: Any, config: EngineConfig, context: Any) -> list[Problem]:
    """Return what every step finds wrong with a model, before one of them touches it."""
    return [problem for step in STEPS if step.check for problem in _imported(step.check)(model, config, context)]


def undo(model: Any) -> None:
    """Take out of a model what an engine's steps have put in, the last first."""
    for step in reversed(STEPS):
        if step.undo:
            _imported(step.undo)(model)


def observers(config: EngineConfig) -> list[Plugin]:
    """Return the observers that a configuration asks for."""
    made = (step.load()(config) for step in OBSERVERS)
    return [observer for observer in made if observer is not None]
