"""Families with multi-token prediction: how many heads a model has, what its files call them, and what builds them.

Add a family: one row of :data:`FAMILIES`. Heads in the layout of DeepSeek-V3 or of Qwen3-Next need nothing else; others
name a builder of their own, which returns :class:`torchturbo.objectives.mtp.serial.SerialHeads`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.objectives.mtp.serial import SerialHeads
    from torchturbo.objectives.planned import Planned, Stored

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names under which configurations say how many heads there are."""
FULL = ("full_attention", "indexed_attention")
"""Kinds of attention, by their names in configurations, that heads have where none is named for them."""
OWN_EMBEDDINGS = "mtp_use_dedicated_embeddings"
"""Name under which configurations of Qwen3.5 say whether the heads have embeddings of their own."""
BUILD = "torchturbo.objectives.mtp.depths:build"


class Family(NamedTuple):
    """Models whose published checkpoints hold heads for multi-token prediction."""

    name: str
    model_type: str
    """Transformers' name of the language model."""
    place: str = "model.layers.{layer}."
    """How the files' names of a head begin: ``{depth}`` counts heads from 0, ``{layer}`` goes on after the layers."""
    build: str = BUILD
    """``package.module:function`` of ``(base, family, heads, stored)`` that returns so many heads."""
    unsaid: int = 0
    """Heads of a model whose configuration names no number; 0 where they all do."""
    refused: str = ""
    """Why its heads are not built at all; empty where they are."""


FAMILIES: tuple[Family, ...] = (
    Family("DeepSeek-V3 and R1", "deepseek_v3"),
    Family("DeepSeek-V3.2", "deepseek_v32"),
    Family("DeepSeek-V4", "deepseek_v4", "mtp.{depth}.", "torchturbo.objectives.mtp.deepseek_v4:build"),
    Family("GLM-4.5 to 4.7", "glm4_moe"),
    Family("GLM-4.7-Flash", "glm4_moe_lite"),
    Family("GLM-5", "glm_moe_dsa"),
    Family("Mellum", "mellum", place="mtp.layers.{depth}."),
    Family("MiMo-7B", "mimo", refused="Transformers has no model of this kind, whose layer its heads could be"),
    Family("MiMo-V2-Flash", "mimo_v2_flash", refused="what its files call the parts of its heads is not published"),
    Family("Qwen3-Next", "qwen3_next", place="mtp.layers.{depth}.", unsaid=1),
    Family("Qwen3.5", "qwen3_5_text", place="mtp.layers.{depth}."),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", place="mtp.layers.{depth}."),
)
"""A row for each family; the support table in the documentation is made of it."""


def find(base: Any, stored: Stored) -> Planned | None:
    """Return the heads that a Transformers model is to get; None for a family that the table does not have."""
    from torchturbo.objectives.planned import Planned

    family = family_of(base.config)
    if family is None:
        return None
    kind = f"multi-token prediction heads of {family.name}"
    if wrong := _no_number(base.config):
        return Planned(kind, obstacle=wrong, remedy="write how many there are, a whole number")
    if reason := family.refused or _unlike(family, base.config.get_text_config(decoder=True)):
        return Planned(kind, obstacle=reason, remedy="train it without")
    said, held = said_by(base.config), None if stored is None else held_by(family, base.config, stored)
    heads = (held or 0) if said is None else said[1]
    if said is None and held is None:
        heads = family.unsaid
    words = (
        "its configuration names no number of them" if said is None else f"{said[0]} is {said[1]} in its config.json"
    )
    if held is not None and held < max(1, heads):
        place = family.place.format(layer=_layers(base.config), depth=0)
        found = f"hold {held}" if held else f"hold no tensor {place}*"
        obstacle = f"{words}, and its files {found}"
        return Planned(kind, obstacle=obstacle, remedy="use a checkpoint with the heads' weights")
    if not heads:
        return Planned(kind, obstacle=words, remedy="use a model that has some")
    if said is not None and held is not None and held > heads:  # which would be lost in every export
        remedy = f"set {said[0]} to {held}, or take the others out of the files"
        return Planned(kind, obstacle=f"{words}, and its files hold {held} of them", remedy=remedy)
    build = partial(_built, family, heads, stored)
    kind = kind if heads > 1 else kind.replace("heads", "head", 1)
    return Planned(f"{heads} {kind}", build)


def _unlike(family: Family, config: Any) -> str:
    """Return why heads as the builder makes them are not what a configuration speaks of; empty where they are."""
    if getattr(config, OWN_EMBEDDINGS, False):
        return f"they have embeddings of their own ({OWN_EMBEDDINGS}), and those built here use the model's"
    try:
        if family.build == BUILD:
            layer_of(config)
    except ValueError as error:
        return str(error)
    return ""


def _built(family: Family, heads: int, stored: Stored, base: nn.Module) -> SerialHeads:
    module, _, name = family.build.partition(":")
    made: SerialHeads = getattr(import_module(module), name)(base, family, heads, stored)
    return made


def family_of(config: Any) -> Family | None:
    """Return the family of a model's configuration; None where the table has none."""
    known = {family.model_type: family for family in FAMILIES}
    text = config.get_text_config(decoder=True)
    return known.get(getattr(text, "model_type", "")) or known.get(getattr(config, "model_type", ""))


def _no_number(config: Any) -> str:
    """Return what a configuration says of the number of heads that is no number of heads; empty where it is one."""
    for part in (config.get_text_config(decoder=True), config):
        for name in COUNTS:
            said = getattr(part, name, None)
            if said is not None and (isinstance(said, bool) or not isinstance(said, int) or said < 0):
                return f"{name} is {said!r} in its config.json; expected a whole number, 0 or more"
    return ""


def said_by(config: Any) -> tuple[str, int] | None:
    """Return how many heads a configuration says there are, and under which name; None where it says nothing."""
    for part in (config.get_text_config(decoder=True), config):
        for name in COUNTS:
            if isinstance(number := getattr(part, name, None), int):
                return name, number
    return None


def held_by(family: Family, config: Any, stored: Stored) -> int:
    """Return how many heads a model's files hold, by the names of their tensors."""
    first, names = _layers(config), stored or ()
    for depth in count():
        if not any(name.startswith(family.place.format(layer=first + depth, depth=depth)) for name in names):
            return depth
    raise AssertionError


def _layers(config: Any) -> int:
    layers: int = config.get_text_config(decoder=True).num_hidden_layers
    return layers


def layer_of(config: Any) -> int:
    """Return the index of the decoder layer that heads are like: the last one of their kind.

    Where a configuration tells the kinds of layers apart, heads have full attention, unless it says which kind theirs is
    (``mtp_layer_types``, ``mtp_mlp_layer_types``); and they choose tokens by themselves.

    Raises
    ------
    ValueError
        The model has no such layer.

    """
    wanted = {
        "layer_types": getattr(config, "mtp_layer_types", None) or FULL,
        "mlp_layer_types": getattr(config, "mtp_mlp_layer_types", None) or (),
        "indexer_types": ("full",),
    }
    fitting = list(range(config.num_hidden_layers))
    for name, known in wanted.items():
        if (kinds := getattr(config, name, None)) and known:
            fitting = [at for at in fitting if kinds[at] in known]
    if not fitting:
        told = "; ".join(
            f"{name} {' or '.join(known)}" for name, known in wanted.items() if getattr(config, name, None)
        )
        raise ValueError(f"none of the model's layers is like theirs: expected {told}")
    return fitting[-1]
