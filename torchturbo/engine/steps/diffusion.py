"""Step: block diffusion. A diffusion model is trained to fill in masked blocks; any other model is left alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from torchturbo.config.layers import Layer
from torchturbo.engine.model import base_model
from torchturbo.engine.steps.losses import computes_causal_cross_entropy
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.objectives.diffusion.mask import KINDS
from torchturbo.objectives.diffusion.models import ATTRIBUTE, attribute_problem, is_diffusion_model, place_of
from torchturbo.objectives.diffusion.objective import BlockDiffusion, attention_of

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

CAP, LOW, HIGH, BLOCK = KEYS_READ = (
    "diffusion.cap_lambda",
    "diffusion.bd_mask_low",
    "diffusion.bd_mask_high",
    "diffusion.bd_block_size",
)
WHOLE = ("full_attention",)
"""Kinds of layers, as configurations call them, that see whatever their mask lets through."""
INSTALLED: WeakKeyDictionary[nn.Module, ref[BlockDiffusion]] = WeakKeyDictionary()
"""Block diffusion of each Transformers model that is trained by it."""
log = get_logger(__name__)


def installed(base: nn.Module) -> BlockDiffusion | None:
    """Return the block diffusion that a Transformers model is trained by; None where it is not."""
    known = INSTALLED.get(base)
    return None if known is None else known()


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return everything that keeps a diffusion model from being trained by block diffusion."""
    base: Any = base_model(model)
    settings = getattr(base, "config", None)
    place = place_of(settings)
    if (wrong := attribute_problem(settings)) is not None:
        return [Problem(place, "", *wrong)]
    if not is_diffusion_model(model):
        return []
    found = [*_kind(model, base, config), *_clashes(model, config)]
    return [Problem(config.origin(key).place if key else place, key, message, remedy) for key, message, remedy in found]


def _kind(model: nn.Module, base: Any, config: EngineConfig) -> Iterator[tuple[str, str, str]]:
    """Yield what of a model has no place in a doubled sequence: the key, the message and the remedy."""
    name, settings = type(base).__name__, base.config
    whole = f"set {ATTRIBUTE} to false to train it on the next token"
    if (found := attention_obstacle(attention_of(base))) is not None:
        yield "", f"{name}: {found[0]}", found[1]
    if settings.get_text_config() is not settings:
        yield "", f"{name} has another tower than the language model, whose tokens can't be doubled", whole
        return
    if not computes_causal_cross_entropy(base):
        yield "", f"{name} computes a loss of its own, expected Transformers' causal cross-entropy", whole
    if not {"attention_mask", "position_ids"} <= inspect.signature(base.forward).parameters.keys():
        yield "", f"{name} takes no attention_mask and position_ids, by which a doubled sequence is told apart", whole
    kinds = dict.fromkeys(kind for kind in getattr(settings, "layer_types", None) or () if kind not in WHOLE)
    for kind in kinds:
        yield "", f"{name} has layers of {kind}, which see less than a mask of block diffusion lets through", whole
    replaced = config.moe.aux_loss_coeff or config.moe.z_loss_coeff  # by the step "router losses"
    if getattr(settings, "output_router_logits", False) and not replaced:
        message = f"{name} computes a router loss of its own (output_router_logits) that takes no 4-D mask"
        yield "", message, "set output_router_logits to false, or moe.aux_loss_coeff above 0"
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        yield "", "PEFT would put a prompt before a sequence whose mask does not know of it", "use LoRA"


def _clashes(model: nn.Module, config: EngineConfig) -> Iterator[tuple[str, str, str]]:
    if config.mtp.enabled:
        message = "a diffusion model predicts the tokens of a block at once, and has no next one for a depth to predict"
        yield "mtp.enabled", message, "set it to false"


def attention_obstacle(kind: str) -> tuple[str, str] | None:
    """Return why an attention can't be used, and what to do about it; None where it can."""
    if kind in KINDS:
        return None
    return f"{kind} can't express the mask of block diffusion", f"use {', '.join(KINDS[:-1])} or {KINDS[-1]}"


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Let a diffusion model take doubled batches, and add CAP to its loss; say which keys another model leaves unread."""
    settings = config.diffusion
    if problems := check(model, config, context):
        fail(problems)
    if not is_diffusion_model(model):
        _warn_of_idle_keys(model, config)
        return
    base = base_model(model)
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    diffusion = BlockDiffusion(model, base, dtype, shared=context.plan.sp_size > 1)
    INSTALLED[base] = ref(diffusion)  # the hooks in the model hold it
    if settings.cap_lambda and context.normaliser is not None:
        diffusion.add_cap(context.normaliser, settings.cap_lambda)
    log.info_rank0(
        "block diffusion: blocks of %d tokens, noise from %g to %g, CAP weighs %g",
        settings.bd_block_size,
        settings.bd_mask_low,
        settings.bd_mask_high,
        settings.cap_lambda,
    )
    if not settings.bd_mask_high:
        message = "0 hides no token, so that nothing is learned and the loss is 0"
        log.warning_rank0("%s", Problem(config.origin(HIGH).place, HIGH, message, "set it above 0"))


def undo(model: nn.Module) -> None:
    """Take it out again."""
    diffusion = installed(base_model(model))
    INSTALLED.pop(base_model(model), None)
    if diffusion is not None:
        diffusion.remove()


def _warn_of_idle_keys(model: nn.Module, config: EngineConfig) -> None:
    for key in KEYS_READ:
        origin = config.origin(key)
        if origin.layer > Layer.DEFAULT:
            name = type(base_model(model)).__name__
            message = f"set but not read ({name} is no diffusion model)"
            remedy = f"it is read for one: by its model_type, by {ATTRIBUTE} in its config.json, or by a plugin"
            log.warning_rank0("%s", Problem(origin.place, key, message, remedy))
