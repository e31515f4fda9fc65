"""Step: multi-token prediction. The extra heads' losses are added to the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.engine.steps.losses import computes_causal_cross_entropy
from torchturbo.errors import Problem
from torchturbo.logging import get_logger
from torchturbo.objectives.changes import Changes
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.mtp.families import family_of
from torchturbo.objectives.mtp.objective import MultiTokenPrediction, metric
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.plugins.contract import Run

ENABLED, WEIGHT, FROZEN = "mtp.enabled", "mtp.loss_scaling_factor", "freeze_policy.language_model"
log = get_logger(__name__)


CHANGES: WeakKeyDictionary[nn.Module, Changes] = WeakKeyDictionary()


class LossLog(Plugin):
    """An observer that writes the losses of all depths into the log, as often as the run logs."""

    def log(self, metrics: dict[str, float], run: Run) -> None:
        """Write them in one line."""
        names = [name for depth in range(1, len(metrics) + 1) if (name := metric(depth)) in metrics]
        if names:
            log.info_rank0("step %d: %s", run.step, ", ".join(f"{name} {metrics[name]:.4f}" for name in names))


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem where the model's loss has no place for those of its heads."""
    base: Any = base_model(model)
    if not config.mtp.enabled:
        return []
    if computes_causal_cross_entropy(base):
        return _idle(base, config)
    message = f"{type(base).__name__} computes a loss of its own, which takes no further term"
    remedy = "train the language model alone (AutoModelForCausalLM), or set it to false"
    return [Problem(config.origin(ENABLED).place, ENABLED, message, remedy)]


def _idle(base: Any, config: EngineConfig) -> list[Problem]:
    """Return a problem where the heads are all that could be trained, and are not."""
    if config.mtp.loss_scaling_factor != 0 or not config.freeze_policy.language_model or not hasattr(base, "config"):
        return []
    config_of_text = base.config.get_text_config(decoder=True)
    if config_of_text is not base.config or family_of(base.config) is None or _has_draft(base):
        return []  # encoders may be left to train
    message = f"with the language model frozen ({FROZEN}), nothing but the heads is left to train"
    return [Problem(config.origin(WEIGHT).place, WEIGHT, message, "give their loss a weight, or freeze less")]


def _has_draft(base: Any) -> bool:
    from torchturbo.objectives.dspark.layouts import find

    return find(base, None) is not None  # whose loss has a weight of its own


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Add a loss term for each depth; with a weight of 0 the heads run and their losses are logged, and that is all.

    Their parameters are then out of training.
    """
    base = base_model(model)
    heads = extra_heads(base)
    if not config.mtp.enabled or not isinstance(heads, SerialHeads) or context.normaliser is None:
        return
    weight: float = config.resolved(WEIGHT)
    objective = MultiTokenPrediction(model, base, heads)
    context.normaliser.terms += objective.terms(weight)
    changes = CHANGES[base] = Changes(objective.taps)
    if weight == 0:
        changes.freeze(heads)
    if config.mtp.log_loss and not any(isinstance(plugin, LossLog) for plugin in context.hooks.plugins):
        context.hooks.plugins += (LossLog(),)
    depths = "1 depth" if heads.depths == 1 else f"{heads.depths} depths"
    log.info_rank0("multi-token prediction: %s, weight %g", depths, weight)


def undo(model: nn.Module) -> None:
    """Take the taps out of a model, and let heads be trained again that the step took out of training."""
    changes = CHANGES.pop(base_model(model), None)
    if changes is not None:
        changes.undo()
