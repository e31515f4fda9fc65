"""Step: DSpark. A draft branch is trained beside the model."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS
from torchturbo.logging import get_logger
from torchturbo.objectives.changes import Changes
from torchturbo.objectives.dspark import backbone, metrics
from torchturbo.objectives.dspark.loss import Alphas
from torchturbo.objectives.dspark.objective import DSpark, Settings
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.normalise import Term
from torchturbo.objectives.taps import Taps

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.plugins.contract import Run

ENABLED, WEIGHT, FROZEN = "dspark.enabled", "dspark.loss_scaling_factor", "freeze_policy.language_model"
ANCHORS, GAMMA = "dspark.num_anchors", "dspark.loss_decay_gamma"
ALPHAS = ("dspark.ce_loss_alpha", "dspark.l1_loss_alpha", "dspark.confidence_loss_alpha")
CHUNK, CHUNK_SIZE = "loss_chunk.enabled", "loss_chunk.chunk_size"
log = get_logger(__name__)


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
    """Add the draft's loss to the model's; off or with a weight of 0 its parameters are out of training."""
    base = base_model(model)
    draft = backbone.of(extra_heads(base))
    if draft is None:
        if config.mtp.enabled and config.dspark.enabled and config.origin(ENABLED).layer:
            text = "%s: %s: %s has no DSpark fields in its configuration: training without"
            log.warning_rank0(text, config.origin(ENABLED).place, ENABLED, type(base).__name__)
        return
    weight = config.resolved(WEIGHT)
    changes = CHANGES[base] = Changes()
    if not config.dspark.enabled or weight == 0:
        changes.freeze(draft)
    if not config.dspark.enabled:
        log.info_rank0("DSpark is off: the draft stays as it is")
        return
    changes.taps = Taps(model, base)
    assert context.normaliser is not None
    run = context.hooks.run
    settings = settings_of(config, _seed(run))
    objective = DSpark(base, draft, changes.taps, context.normaliser, settings, lambda: run.step if run else 0)
    context.normaliser.terms.append(Term(metrics.LOSS, objective.value, objective.weight, coefficient=weight))
    log.info_rank0("DSpark: blocks of %d after at most %d anchors a row", draft.block_size, objective.settings.most)


def settings_of(config: EngineConfig, seed: int = 0) -> Settings:
    """Return how a configuration wants a draft to be trained."""
    return Settings(
        most=config.resolved(ANCHORS),
        gamma=config.resolved(GAMMA),
        alphas=Alphas(*(config.resolved(path) for path in ALPHAS)),
        chunk_size=config.resolved(CHUNK_SIZE) if config.get(CHUNK) else KEYS[CHUNK_SIZE].default,
        seed=seed,
    )


def _seed(run: Run | None) -> int:
    """Return the seed of a run, which all its ranks have in common; 0 for an engine that no trainer runs."""
    return 0 if run is None or run.trainer is None else int(run.trainer.args.seed)


def undo(model: nn.Module) -> None:
    """Take the taps out of a model, and let a draft be trained again that the step took out of training."""
    changes = CHANGES.pop(base_model(model), None)
    if changes is not None:
        changes.undo()
