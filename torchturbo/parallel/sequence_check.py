"""Whether a model's sequences can be shared by ranks, found before its weights are read.

Sequence parallelism knows one place where tokens of a sequence meet: attention that is called by Transformers'
registry. Everything else of a model must compute each token alone, or from its position.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.objectives.normalise import own_loss_function
from torchturbo.ops.replace import innermost
from torchturbo.parallel.ulysses import attention_globals

Obstacle = tuple[str, str]
"""What keeps a model from it, and what to do about it."""

ALONE = "use sp_size 1"
MIXERS = ("deltanet", "mamba", "rwkv", "recurrent", "shortconv", "lightning", "linearattention", "retention")
"""Parts of the names of classes in which tokens meet outside of attention."""
CHOOSERS = ("indexer", "compressor")
"""Parts of the names of classes that choose, from all tokens, which ones an attention sees."""


def obstacles(model: nn.Module, size: int, *, router_loss: bool = True) -> list[Obstacle]:
    """Return everything that keeps ``size`` ranks from sharing a model's sequences; its weights may be on meta.

    ``router_loss`` says whether the model goes on to compute its own auxiliary loss where it is set to.
    """
    base: Any = base_model(model)
    config = getattr(base, "config", None)
    if config is None:
        return [(f"{type(base).__name__} is no Transformers model, whose attention can be exchanged", ALONE)]
    return [
        *_kind(model, base, config),
        *_layers(base, config),
        *_heads(base, config, size),
        *_settings(config, router_loss),
    ]


def _kind(model: nn.Module, base: Any, config: Any) -> Iterator[Obstacle]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(base).__name__
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name} is an encoder-decoder: its two sequences have different lengths", ALONE
    elif text is not config:
        yield f"{name} has another tower than the language model, whose tokens are no part of the sequence", ALONE
    loss = own_loss_function(base)
    if getattr(loss, "replaces", loss) is not ForCausalLMLoss:
        found = getattr(loss, "__name__", type(loss).__name__)
        yield f"{name} uses the loss {found}, whose parts are not known to add up; expected ForCausalLMLoss", ALONE
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters:
        yield f"{name} takes no position_ids, and would count each part of a sequence from 0", ALONE
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        yield "PEFT would put a prompt before each part of a sequence", "use LoRA, or sp_size 1"


def _layers(base: Any, config: Any) -> Iterator[Obstacle]:
    """Yield each kind of layer in which tokens meet elsewhere than in attention under Transformers' registry."""
    kinds = dict.fromkeys(type(module) for module in base.modules())
    attending = {kind for kind in kinds if attention_globals(kind)}
    if not attending:
        yield f"{type(base).__name__} has no attention that is called by Transformers' AttentionInterface", ALONE
        return
    yield from _deaf(base, attending)
    for kind in kinds:
        known = kind.__name__.lower().replace("_", "")
        if issubclass(kind, nn.Embedding) and "attention_mask" in inspect.signature(kind.forward).parameters:
            yield f"{kind.__name__} counts positions by the mask of padding, of a part of the sequence only", ALONE
        elif issubclass(kind, nn.Conv1d | nn.Conv2d) or any(word in known for word in MIXERS):
            yield f"{kind.__name__}: its state would begin anew in each part of a sequence", ALONE
        elif any(word in known for word in CHOOSERS):
            yield f"{kind.__name__} chooses among the tokens of a part of the sequence only", ALONE
    for layer in _decoder_layers(base):
        if not any(type(module) in attending for module in layer.modules()):
            yield f"{type(layer).__name__}: a layer without attention under Transformers' AttentionInterface", ALONE
            break
    if getattr(config, "is_causal", True) and any(
        getattr(module, "is_causal", True) is False for module in base.modules() if type(module) in attending
    ):
        yield f"{type(base).__name__} attends to both sides, expected a causal language model", ALONE
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        yield "attention in chunks (chunked_attention): its mask can't be told from a causal one", ALONE


def _deaf(base: Any, attending: set[type]) -> Iterator[Obstacle]:
    """Yield the kinds of modules around an attention that do not hand on the keyword by which it knows the whole."""
    for kind in dict.fromkeys(type(module) for module in base.modules()):
        if kind not in attending:
            continue
        if "position_bias" in innermost(kind.forward).__code__.co_varnames:
            yield f"{kind.__name__} adds a bias for each position, of a part of the sequence only", ALONE
        if any("mask" in name for name in vars(kind)):
            yield f"{kind.__name__} makes a mask of its own, of a part of the sequence only", ALONE
    around = dict.fromkeys(
        type(module) for module in base.modules() if any(type(inner) in attending for inner in module.modules())
    )
    for kind in around:
        if not issubclass(kind, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not _hands_keywords_on(kind):
            yield f"{kind.__name__} hands no keywords on, by which attention learns of the whole sequence", ALONE


def _hands_keywords_on(kind: type[nn.Module]) -> bool:
    code = innermost(kind.forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return any(at.argval == name and at.opname.startswith("LOAD") for at in dis.get_instructions(code))


def _decoder_layers(base: Any) -> Iterator[nn.Module]:
    for module in base.modules():
        if isinstance(module, nn.ModuleList):
            yield from (layer for layer in module if hasattr(layer, "gradient_checkpointing"))


def _heads(base: Any, config: Any, size: int) -> Iterator[Obstacle]:
    counts = {getattr(config, "num_attention_heads", None)}
    counts |= {getattr(module, "num_heads", None) for module in base.modules() if attention_globals(type(module))}
    wrong = sorted(heads for heads in counts if isinstance(heads, int) and heads % size)
    if wrong:
        common = [value for value in range(1, wrong[0] + 1) if all(heads % value == 0 for heads in wrong)]
        below, above = [v for v in common if v < size], [v for v in common if v > size]
        nearest = " or ".join(map(str, [*below[-1:], *above[:1]]))
        heads = ", ".join(map(str, wrong))
        yield (
            f"{heads} attention heads do not divide by {size}: each rank attends with its share of them",
            f"use {nearest}",
        )


def _settings(config: Any, router_loss: bool) -> Iterator[Obstacle]:
    if router_loss and getattr(config, "output_router_logits", False):
        message = "the model's own router loss (output_router_logits) is no sum over tokens: its parts do not add up"
        yield (
            message,
            (
                "set output_router_logits to false in the model's configuration, or have the engine's loss instead"
                " (moe.aux_loss_coeff)"
            ),
        )
    if getattr(config, "output_attentions", False):
        message = "attention weights (output_attentions) of all heads are on no rank"
        yield message, "set output_attentions to false in the model's configuration"
