"""Step: operators. Each operator of the model gets the implementation that the policy chooses for this device."""

from __future__ import annotations

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
    remove(model)  # an earlier trainer may have prepared the same model
    choices = policy.plan(_situation(model, config, context), policy.CUSTOM)
    lacking = policy.missing(choices, context.runtime.device_type)
    return [Problem(config.origin(KEY).place, KEY, message, remedy) for message, remedy in lacking]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Choose, tell in one table, and install; ``native`` leaves the model as Transformers wrote it."""
    remove(model)
    chosen = config.ops.policy
    situation = _situation(model, config, context)
    if chosen == NATIVE:
        return
    if problems := check(model, config, context):
        fail(problems)
    choices = policy.plan(situation, chosen)
    log.info_rank0("%s", policy.table(choices, situation, chosen))
    policy.install(choices, situation)


def remove(model: nn.Module) -> None:
    """Put every operator of a model back as it was."""
    policy.remove(base_model(model))


def _situation(model: nn.Module, config: EngineConfig, context: Context) -> policy.Situation:
    return policy.Situation(
        base=base_model(model),
        runtime=context.runtime,
        dtype="bfloat16" if config.mixed_precision == "bf16" else "float32",
        deterministic=config.use_deterministic_algorithms,
        chunked_loss=config.loss_chunk.enabled,
    )
