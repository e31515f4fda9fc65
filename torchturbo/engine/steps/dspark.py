"""Step: DSpark. A draft branch is trained beside the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS
from torchturbo.logging import get_logger
from torchturbo.objectives.dspark import backbone, metrics
from torchturbo.objectives.dspark.loss import Alphas
from torchturbo.objectives.dspark.objective import DSpark, Settings
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.normalise import Term
from torchturbo.objectives.taps import Taps

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

ENABLED, WEIGHT, FROZEN = "dspark.enabled", "dspark.loss_scaling_factor", "freeze_policy.language_model"
ANCHORS, GAMMA = "dspark.num_anchors", "dspark.loss_decay_gamma"
ALPHAS = ("dspark.ce_loss_alpha", "dspark.l1_loss_alpha", "dspark.confidence_loss_alpha")
CHUNK, CHUNK_SIZE = "loss_chunk.enabled", "loss_chunk.chunk_size"
log = get_logger(__name__)


@dataclass
class Changes:
    """What the step did to a model; it keeps neither the model nor its parameters alive."""

    taps: Taps | None = None
    frozen: list[ref[nn.Parameter]] = field(default_factory=list)


CHANGES: WeakKeyDictionary[nn.Module, Changes] = WeakKeyDictionary()


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem where the draft is all that could be trained, and is not."""
    from torchturbo.objectives.dspark.layouts import find

    idle = not config.dspark.enabled or config.dspark.loss_scaling_factor == 0
    if not config.mtp.enabled or not idle or not config.freeze_policy.language_model:
        return []
    base = base_model(model)
    planned = find(base, None)
    if planned is None or planned.build is None:
        return []
    path = WEIGHT if config.dspark.enabled else ENABLED
    message = f"with the language model frozen ({FROZEN}), nothing but the draft is left to train"
    return [Problem(config.origin(path).place, path, message, "train the draft, or freeze less")]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Add the draft's loss to the model's; off or with a weight of 0 its parameters are out of training.

    Gradients of zero would still let an optimizer's weight decay and momentum move them.
    """
    base = base_model(model)
    draft = backbone.of(extra_heads(base))
    if draft is None:
        if config.mtp.enabled and config.dspark.enabled and config.origin(ENABLED).layer:
            text = "%s: %s: %s has no DSpark fields in its configuration: training without"
            log.warning_rank0(text, config.origin(ENABLED).place, ENABLED, type(base).__name__)
        return
    weight = value_of(config, WEIGHT)
    changes = CHANGES[base] = Changes()
    if not config.dspark.enabled or weight == 0:
        changes.frozen = [ref(parameter) for parameter in draft.parameters() if parameter.requires_grad]
        draft.requires_grad_(False)
    if not config.dspark.enabled or context.normaliser is None:
        log.info_rank0("DSpark is off: the draft stays as it is")
        return
    changes.taps = Taps(model, base)
    run = context.hooks.run
    objective = DSpark(
        base, draft, changes.taps, context.normaliser, settings_of(config, _seed(run)), lambda: run.step if run else 0
    )
    context.normaliser.terms.append(Term(metrics.LOSS, objective.value, objective.weight, coefficient=weight))
    log.info_rank0("DSpark: blocks of %d after at most %d anchors a row", draft.block_size, objective.settings.most)


def value_of(config: EngineConfig, path: str) -> Any:
    """Return a key's value; its default where it is null."""
    value = config.get(path)
    return KEYS[path].default if value is None else value


def settings_of(config: EngineConfig, seed: int = 0) -> Settings:
    """Return how a configuration wants a draft to be trained."""
    size = CHUNK_SIZE if config.get(CHUNK) else None
    return Settings(
        most=value_of(config, ANCHORS),
        gamma=value_of(config, GAMMA),
        alphas=Alphas(*(value_of(config, path) for path in ALPHAS)),
        chunk_size=KEYS[CHUNK_SIZE].default if size is None else value_of(config, size),
        seed=seed,
    )


def _seed(run: Any) -> int:
    """Return the seed of a run, which all its ranks have in common; 0 outside of one."""
    return int(getattr(getattr(getattr(run, "trainer", None), "args", None), "seed", 0) or 0)


def undo(model: nn.Module) -> None:
    """Take the taps out of a model, and let a draft be trained again that the step took out of training."""
    changes = CHANGES.pop(base_model(model), None)
    if changes is None:
        return
    if changes.taps is not None:
        changes.taps.remove()
    for reference in changes.frozen:
        if (parameter := reference()) is not None:
            parameter.requires_grad_(True)
