"""Step: operators. Each operator of the model gets the implementation that the policy chooses for this device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.ops import policy
from torchturbo.ops.registry import NATIVE

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEY = "ops.policy"
log = get_logger(__name__)


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem for each operator of a model for which ``custom`` finds no optimised implementation."""
    if config.ops.policy != policy.CUSTOM:
        return []
    return _lacking(policy.plan(_situation(model, config, context), policy.CUSTOM), config, context)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Choose, tell in one table, and install; ``native`` leaves the model as Transformers wrote it."""
    chosen = config.ops.policy
    if chosen == NATIVE:
        return
    situation = _situation(model, config, context)
    choices = policy.plan(situation, chosen)
    if chosen == policy.CUSTOM and (problems := _lacking(choices, config, context)):
        fail(problems)
    log.info_rank0("%s", policy.table(choices, situation, chosen))
    policy.install(choices, situation)


def undo(model: nn.Module) -> None:
    """Put every operator of a model back as it was."""
    policy.remove(base_model(model))


def _lacking(choices: Sequence[policy.Choice], config: EngineConfig, context: Context) -> list[Problem]:
    lacking = policy.missing(choices, context.runtime.device_type)
    return [Problem(config.origin(KEY).place, KEY, message, remedy) for message, remedy in lacking]


def _situation(model: nn.Module, config: EngineConfig, context: Context) -> policy.Situation:
    return policy.Situation(
        base=base_model(model),
        runtime=context.runtime,
        dtype="bfloat16" if config.mixed_precision == "bf16" else "float32",
        deterministic=config.use_deterministic_algorithms,
        chunked_loss=config.loss_chunk.enabled,
    )
