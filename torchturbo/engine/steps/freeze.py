"""Step: freeze policy. The parameters of the chosen parts of a model are not trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchturbo.engine.model import base_model, input_embeddings
from torchturbo.engine.parts import FAMILIES, GROUPS, Partition, partition, parts_of
from torchturbo.errors import Problem
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

SECTION = "freeze_policy"
SHOWN_NAMES = 3
log = get_logger(__name__)


@dataclass
class Changes:
    """What the step did to a model; it keeps neither the model nor its parameters alive."""

    frozen: list[ref[nn.Parameter]] = field(default_factory=list)
    hook: RemovableHandle | None = None


CHANGES: WeakKeyDictionary[nn.Module, Changes] = WeakKeyDictionary()


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Take the chosen parts out of training, adapters inside them included, and say how much that is.

    It runs before the number formats are chosen and before the optimizer: a frozen parameter gets no fp32 copy, no
    gradient and no optimizer state. What somebody froze before stays frozen.
    """
    base = base_model(model)
    parts = parts_of(base)
    if parts is None:  # check() has refused the keys for it
        return
    groups = partition(base, parts).groups
    changes = CHANGES[base] = Changes()
    if wanted := _wanted(config):
        for group in wanted:
            changes.frozen += [ref(parameter) for parameter in groups[group].values() if parameter.requires_grad]
        frozen = ", ".join(_freeze(group, groups[group].values(), _has_adapters(model, base)) for group in wanted)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        own = f"{trained:,} parameters" if trained or not config.mtp.enabled else ""
        heads = "the extra heads" if config.mtp.enabled else ""  # which a later step builds
        log.info_rank0("frozen: %s; trained: %s", frozen, " and ".join(filter(None, (own, heads))))
    optional = (*groups["multi_modal_projector"].values(), *groups["vision_tower"].values())
    trained_optional = [parameter for parameter in optional if parameter.requires_grad]
    context.partly_used = bool(trained_optional)
    embeddings = input_embeddings(base)
    language_trains = any(parameter.requires_grad for parameter in groups["language_model"].values())
    if trained_optional and embeddings is not None and not language_trains:
        changes.hook = embeddings.register_forward_hook(partial(_always_reached, trained_optional[0]))


def undo(model: nn.Module) -> None:
    """Let everything be trained again that the step took out of training."""
    changes = CHANGES.pop(base_model(model), None)
    if changes is None:
        return
    for reference in changes.frozen:
        if (parameter := reference()) is not None:
            parameter.requires_grad_(True)
    if changes.hook is not None:
        changes.hook.remove()


def _always_reached(parameter: nn.Parameter, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Hook of the text embeddings: tie one trained parameter to the loss of every batch, by adding nothing.

    Behind a frozen language model the loss of a batch without images depends on nothing that is trained: backward
    would raise on this rank, and the others would wait for its part in reducing gradients.
    """
    if not (module.training and torch.is_grad_enabled()):
        return output
    return output + (parameter.reshape(-1)[0] * 0).to(output.dtype)


def _freeze(group: str, parameters: Collection[nn.Parameter], has_adapters: bool) -> str:
    """Freeze parameters and return how much that was, in words."""
    total = sum(parameter.numel() for parameter in parameters)
    # PEFT has frozen the model around its adapters: what is trained inside the group is theirs.
    adapters = sum(parameter.numel() for parameter in parameters if parameter.requires_grad) if has_adapters else 0
    for parameter in parameters:
        parameter.requires_grad_(False)
    return f"{group} ({total:,} parameters" + (f", {adapters:,} of them adapters')" if adapters else ")")


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps the chosen parts from being frozen; looks at names alone."""
    wanted = _wanted(config)
    if not wanted:
        return []
    base = base_model(model)
    parts = parts_of(base)
    if parts is None:
        return [_unknown(base, config, wanted)]
    found = partition(base, parts)
    kind = type(base).__name__
    problems = [
        Problem(config.origin(_key(group)).place, _key(group), f"{kind} has no such part", "remove it")
        for group in wanted
        if not found.groups[group]
    ]
    if found.unplaced:
        shown = ", ".join(found.unplaced[:SHOWN_NAMES])
        more = f" and {len(found.unplaced) - SHOWN_NAMES} more" if len(found.unplaced) > SHOWN_NAMES else ""
        message = f"{kind} has parameters that are in none of the three parts, or in two: {shown}{more}"
        problems.append(Problem(config.origin(_key(wanted[0])).place, SECTION, message, "train without freezing"))
    elif not problems and not _left(model, found, wanted, config):
        places = ", ".join(dict.fromkeys(config.origin(_key(group)).place for group in wanted))
        message = f"with {' and '.join(wanted)} frozen, nothing is left to train"
        problems.append(Problem(places, SECTION, message, "freeze less"))
    return problems


def _wanted(config: EngineConfig) -> list[str]:
    return [group for group in GROUPS if getattr(config.freeze_policy, group)]


def _key(group: str) -> str:
    return f"{SECTION}.{group}"


def _unknown(base: nn.Module, config: EngineConfig, wanted: list[str]) -> Problem:
    model_type = getattr(getattr(base, "config", None), "model_type", None) or type(base).__name__
    message = f"the parts of {model_type} models are not known, only those of {', '.join(FAMILIES)} and of text models"
    remedy = "name them with torchturbo.engine.parts.register, as in docs/guides/freezing.md"
    return Problem(config.origin(_key(wanted[0])).place, SECTION, message, remedy)


def _left(model: nn.Module, found: Partition, wanted: list[str], config: EngineConfig) -> bool:
    """Return whether something is trained; heads that a later step adds are."""
    frozen = {id(parameter) for group in wanted for parameter in found.groups[group].values()}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in frozen)
    return config.mtp.enabled or next(trained, None) is not None


def _has_adapters(model: nn.Module, base: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None)) or bool(getattr(base, "_hf_peft_config_loaded", False))
