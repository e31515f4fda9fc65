"""Step: extra heads. The layers that multi-token prediction and DSpark train are built into the model."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchturbo.checkpoint.heads import Said, initialise, saves_heads, saves_plainly, say_again, say_none
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.model import base_model
from torchturbo.errors import Problem, fail
from torchturbo.generated.keys import KEYS
from torchturbo.logging import get_logger
from torchturbo.objectives.dspark import layouts
from torchturbo.objectives.heads import BESIDE, NAME, ExtraHeads, attach, detach, draft_beside, extra_heads
from torchturbo.objectives.mtp.families import FAMILIES, family_of, held_by
from torchturbo.objectives.planned import Planned

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

KEY = "mtp.enabled"
FINDERS = ("torchturbo.objectives.dspark.layouts:find", "torchturbo.objectives.mtp.families:find")
"""What looks for heads that a model can have, one objective after the other: the first that finds some has the say."""
log = get_logger(__name__)


SAID: WeakKeyDictionary[nn.Module, Said] = WeakKeyDictionary()
"""What the configurations of each model that the step has changed said of heads that it does not get."""
KEPT: WeakKeyDictionary[nn.Module, ExtraHeads] = WeakKeyDictionary()
"""The heads of each model that has been prepared with some: a later engine goes on training them."""


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what keeps a model from getting the heads that are asked for; reads the headers of its files."""
    if not config.mtp.enabled:
        return []
    base: Any = base_model(model)
    place, kind = config.origin(KEY).place, type(base).__name__
    if not hasattr(base, "config"):
        return [
            Problem(place, KEY, f"{kind} is no Transformers model, whose layers heads could be like", "set it to false")
        ]
    kind += f" ({base.config.model_type})"
    if base is not model or getattr(base, "_hf_peft_config_loaded", False):
        message = "adapters are saved without the model, and the heads would be lost"
        return [Problem(place, KEY, message, "train the whole model, or set it to false")]
    if (found := getattr(base, NAME, None)) is not None and not isinstance(found, ExtraHeads):
        message = (
            f"{kind} has a module {NAME} of its own ({type(found).__name__}), in whose place the heads would stand"
        )
        return [Problem(place, KEY, message, "set it to false")]
    if (kept := KEPT.get(base) or extra_heads(base)) is not None:
        wrong = kept.unlike(base)
        remedy = "train the heads anew: save the model without them, and load it again"
        return [Problem(place, KEY, f"the heads that {kind} has {wrong}", remedy)] if wrong else []
    if isinstance(model, FSDPModule):
        message = f"this {type(model).__name__} was sharded without extra heads"
        return [Problem(place, KEY, message, "make the model anew")]
    planned = _planned(base, _stored(base, context))
    if planned.build is None:
        message = f"{kind} has no {planned.kind.removeprefix('a ')}: {planned.obstacle}"
        return [Problem(place, KEY, message, f"{planned.remedy}, or set it to false")]
    return _unlike_files(base, planned.build, _source(base, context))


def _unlike_files(base: Any, build: Any, source: WeightSource | None) -> list[Problem]:
    """Return what of a model's heads its files lack, or hold in another shape."""
    if source is None:
        return []
    with torch.device("meta"):
        heads = build(base)
    attach(base, heads)
    try:
        return source.heads_problems(base)
    finally:
        detach(base)


def _planned(base: Any, stored: frozenset[str] | None) -> Planned:
    for finder in FINDERS:
        module, _, name = finder.partition(":")
        found: Planned | None = getattr(import_module(module), name)(base, stored)
        if found is not None:
            return found
    if any(row.find == layouts.DENSE and row.model_type == base.config.model_type for row in layouts.LAYOUTS):
        obstacle = "its family has none for multi-token prediction, and nothing says which DSpark draft it is to get"
        remedy = f"add dspark_config to its config.json, or a folder {BESIDE}/ with a draft"
        return Planned("extra heads", obstacle=obstacle, remedy=remedy)
    known = ", ".join(family.name for family in FAMILIES if not family.refused)
    return Planned("extra heads", obstacle="none are known for this kind of model", remedy=f"use one of {known}")


def _source(base: Any, context: Context) -> WeightSource | None:
    """Return the files that a model's weights are from; None for one that was made from a configuration alone."""
    if context.weights is not None:
        return context.weights
    if not hasattr(base, "_weight_conversions"):  # set by from_pretrained
        return None
    return WeightSource.find(base.config._name_or_path, revision=getattr(base.config, "_commit_hash", None))


def _stored(base: Any, context: Context) -> frozenset[str] | None:
    source = _source(base, context)
    return None if source is None else frozenset(source.stored)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Build a model's heads, as new members of it; without them its configuration says so, in exports too."""
    base: Any = base_model(model)
    SAID[base] = []
    _adopt(base)
    if not config.mtp.enabled:
        SAID[base] = say_none(base)
        if SAID[base] and (held := _held(base, context)):
            message = "the checkpoint has %d extra %s (mtp), not trained and not exported; %s true keeps them"
            log.warning_rank0(message, held, "heads" if held > 1 else "head", KEYS[KEY].cli)
        if left := draft_beside(base):
            log.warning_rank0("%s is left aside: what is saved will have no draft (%s is off)", left, KEY)
        return
    if problems := check(model, config, context):
        fail(problems)
    if base in KEPT:
        attach(base, KEPT[base].train(base.training))
    else:
        _build(base, context)
    saves_heads(base)


def _held(base: Any, context: Context) -> int:
    """Return how many heads for multi-token prediction a model's files hold, as far as there are files."""
    family = family_of(base.config)
    if family is None:
        return 0
    with suppress(OSError):  # of files that are no longer there nothing is said
        return held_by(family, base.config, _stored(base, context))
    return 0


def _adopt(base: Any) -> None:
    """Know the heads of a model that is a copy of one that has some: copied, or read from a pickle."""
    heads = detach(base)
    if heads is not None:
        KEPT.setdefault(base, heads)


def _build(base: Any, context: Context) -> None:
    """Build the heads and give them their weights, unless those come with the model's own after sharding."""
    source = _source(base, context)
    planned = _planned(base, None if source is None else frozenset(source.stored))
    assert planned.build is not None
    empty = any(parameter.is_meta for parameter in base.parameters())
    before = torch.get_default_dtype()
    torch.set_default_dtype(base.dtype)
    try:
        with torch.device(base.device if source is None else "meta"):
            heads = planned.build(base)
    finally:
        torch.set_default_dtype(before)
    _keep_formats(base, heads)
    attach(base, heads.train(base.training))
    KEPT[base] = heads
    count = sum(parameter.numel() for parameter in heads.parameters())
    log.info_rank0("extra heads: %s (%s parameters)", planned.kind, f"{count:,}")
    if heads.made_new and source is not None:
        log.warning_rank0("%s: the files have no weights of it, and it begins anew", planned.kind)
    if source is None and not empty:
        initialise(base, heads)
        log.info_rank0("the model is from no checkpoint: its extra heads begin with random weights")
    elif source is not None and not empty:
        source.load_heads(base)


def _keep_formats(base: nn.Module, heads: nn.Module) -> None:
    """Give tensors the number format that the model's tensors of the same name have, where that is not the model's own.

    A router's bias is fp32 in a bf16 model.
    """
    formats: dict[str, set[torch.dtype]] = {}
    for name, tensor in (*base.named_parameters(), *base.named_buffers()):
        formats.setdefault(_last(name), set()).add(tensor.dtype)
    for name, tensor in (*heads.named_parameters(), *heads.named_buffers()):
        known = formats.get(_last(name), set())
        if tensor.is_floating_point() and len(known) == 1:
            tensor.data = tensor.data.to(next(iter(known)))


def _last(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def undo(model: nn.Module) -> None:
    """Take the heads out of a model, and let its configuration say again how many it has."""
    base: Any = base_model(model)
    said = SAID.pop(base, None)
    if said is None:
        return
    say_again(said)
    saves_plainly(base)
    detach(base)


def keep(model: nn.Module, heads: ExtraHeads | None) -> None:
    """Leave heads in a model that is released: they were trained, and are saved with it.

    One without heads says so where it is saved, also if its configuration speaks of some that it came without.
    """
    base: Any = base_model(model)
    if heads is not None:
        attach(base, heads)
    said = say_none(base)
    say_again(said)
    if heads is not None or said:
        SAID[base] = []
        saves_heads(base)
