"""Step: router losses. Experts are kept evenly loaded, and router logits small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.engine.steps.diffusion import installed
from torchturbo.engine.steps.losses import computes_causal_cross_entropy
from torchturbo.errors import Problem, fail, some
from torchturbo.logging import get_logger
from torchturbo.objectives.heads import NAME, extra_heads
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.objectives.router_losses import OWN, RouterLosses
from torchturbo.objectives.routers import Router, find_routers
from torchturbo.parallel.experts import number_of_experts

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

AUX, Z = "moe.aux_loss_coeff", "moe.z_loss_coeff"
REENTRANT = "activation_checkpointing.use_reentrant"
INSTALLED: WeakKeyDictionary[nn.Module, ref[RouterLosses]] = WeakKeyDictionary()
"""The router losses of every model that has them."""
log = get_logger(__name__)


def asked_for(config: EngineConfig) -> list[str]:
    """Return the coefficients that are above 0; the model's own auxiliary loss is off then."""
    return [key for key, value in ((AUX, config.moe.aux_loss_coeff), (Z, config.moe.z_loss_coeff)) if value > 0]


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps a model from having router losses; its weights are not looked at."""
    keys = asked_for(config)
    if not keys:
        return []
    base = base_model(model)
    obstacles = _obstacles(model, base)
    problems = [Problem(config.origin(key).place, key, *found) for key in keys for found in obstacles]
    return problems + ([] if obstacles else _reentrant_problems(base, config))


def _obstacles(model: Any, base: nn.Module) -> list[tuple[str, str]]:
    """Return what is wrong and the remedy, for each thing."""
    kind = type(base).__name__
    if not computes_causal_cross_entropy(base):
        return [(f"{kind} computes a loss of its own, which takes no further term", "set it to 0")]
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        return [("PEFT puts a prompt before each sequence, of which a batch's mask does not tell", "use LoRA")]
    routers = find_routers(base)
    remedy = "set it to 0, or register the router in a plugin (torchturbo.objectives.routers.register)"
    if routers.unknown:
        return [(reason, remedy) for reason in routers.unknown]
    if routers.found:
        return []
    if routers.hashed:
        return [(f"the routers of {kind} look experts up by the token: there is nothing to balance", "set it to 0")]
    return [(f"{kind} has no layer in which a router chooses among experts", "set it to 0")]


def _reentrant_problems(base: nn.Module, config: EngineConfig) -> list[Problem]:
    """Return a problem where layers with routers are recomputed without notes, in which the gradient could be handed on."""
    section = config.activation_checkpointing
    if not section.enabled or not section.use_reentrant:
        return []
    for router in find_routers(base).found:
        layer, name = None, router.name
        while name:
            name = name.rpartition(".")[0]
            layer = base.get_submodule(name)
            if hasattr(layer, "gradient_checkpointing"):
                break
        if layer is not None and not number_of_experts(layer):
            message = f"the router losses would get no gradient: {type(layer).__name__} does not note how it routes"
            return [Problem(config.origin(REENTRANT).place, REENTRANT, message, "set it to false")]
    return []


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Read the routers' logits in training, and add their losses to the model's instead of its own auxiliary loss."""
    aux, z = config.moe.aux_loss_coeff, config.moe.z_loss_coeff
    if not asked_for(config):
        return
    if problems := check(model, config, context):
        fail(problems)
    base = base_model(model)
    routers = [router for router in find_routers(base).found if _counts(base, router)]
    if frozen := [router.name for router in routers if not _is_trained(base, router)]:
        log.warning_rank0(
            "router losses: %d of %d routers are frozen (%s): their losses are added and train only what comes before",
            *(len(frozen), len(routers), some(frozen)),
        )
    if context.normaliser is None or not routers:
        return
    if getattr(base.config, OWN, False):
        log.warning_rank0(
            "router losses: the model's own one (%s) is off: %s in its place", OWN, " and ".join(asked_for(config))
        )
    diffusion = installed(base)  # its mask lets padding attend to itself
    real = (lambda: diffusion.real) if diffusion is not None else (lambda: None)
    losses = RouterLosses(model, base, routers, real)
    INSTALLED[base] = ref(losses)  # the hooks in the model hold it
    losses.install(context.normaliser, aux, z)


def undo(model: nn.Module) -> None:
    """Leave the routers alone, and let the model compute its own auxiliary loss again."""
    known = INSTALLED.pop(base_model(model), None)
    if known is not None and (losses := known()) is not None:
        losses.remove()


def _counts(base: nn.Module, router: Router) -> bool:
    """Return whether a router sees the micro-batch's tokens in layers that are trained on them.

    Those of a draft branch see guesses. Heads for multi-token prediction that only run to be logged (weight 0) are
    frozen, and a loss of theirs would train the model before them.
    """
    if not router.name.startswith(f"{NAME}."):
        return True
    heads = extra_heads(base)
    return isinstance(heads, SerialHeads) and any(parameter.requires_grad for parameter in heads.parameters())


def _is_trained(base: nn.Module, router: Router) -> bool:
    """Return whether a router has a trained parameter; an adapter's stand around it."""
    around = base.get_submodule(router.name)
    return any(parameter.requires_grad for parameter in around.parameters())
