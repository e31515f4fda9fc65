"""The units of sharding: which modules of a model FSDP2 gathers and frees together.

    root (norm, head, tied embeddings, whatever is in no other unit)
    ├── embeddings, where the head has weights of its own
    ├── each layer, in the model's order
    │   └── its experts
    └── each unit of extra heads, in the order in which they run
        └── its experts

Layers are what Transformers checkpoints: the entries of a ``ModuleList`` that are checkpointing layers or of a class
in ``_no_split_modules``. Extra heads name their units themselves (:attr:`torchturbo.objectives.heads.ExtraHeads.units`)
and run after the model's layers, so that they are a stack of their own. A unit's parameters are gathered before its forward and before its backward, and freed after.

To gather is a collective, so a unit has to run on every rank or on none. What only some batches reach (a vision or
audio tower, its projector, cross-attention to it) is no unit: it belongs to the root, which every batch gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from torchturbo.engine.model import base_model, input_embeddings
from torchturbo.engine.parts import parts_of
from torchturbo.objectives.heads import ExtraHeads, extra_heads
from torchturbo.parallel.experts import find_experts


class LayerUnit(NamedTuple):
    """One layer and its experts, each a unit of its own."""

    name: str
    module: nn.Module
    stack: str
    """Name of what the layer is in: a vision tower's layers are not followed by the language model's."""
    experts: tuple[tuple[str, nn.Module], ...] = ()
    """Name and module of each set of experts inside the layer."""


@dataclass(frozen=True)
class Units:
    """All units of a model."""

    root: nn.Module
    """The module that is called."""
    layers: tuple[LayerUnit, ...]
    embeddings: nn.Module | None
    """The input embeddings, where nothing else shares their weight."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield every module in the order in which it has to be sharded: what is inside first."""
        for layer in self.layers:
            yield from (module for _, module in layer.experts)
            yield layer.module
        if self.embeddings is not None:
            yield self.embeddings
        yield self.root


def find_units(model: nn.Module) -> Units:
    """Return the units of a model, sharded or not, on any device."""
    base = base_model(model)
    classes = set(getattr(base, "_no_split_modules", None) or ())
    always_reached, heads = _always_reached(model), extra_heads(base)
    of_heads = set() if heads is None else {id(module) for module in heads.modules()}
    layers: list[LayerUnit] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer.name}.") for layer in layers[-1:])
        if not isinstance(module, nn.ModuleList) or inside or id(module) in of_heads:
            continue
        layers += [
            LayerUnit(f"{name}.{at}", entry, name, tuple(_experts(entry, f"{name}.{at}")))
            for at, entry in enumerate(module)
            if (isinstance(entry, GradientCheckpointingLayer) or _class_names(entry) & classes)
            and always_reached(f"{name}.{at}")
        ]
    return Units(model, (*layers, *_head_units(model, heads)), _own_embeddings(model))


def _head_units(model: nn.Module, heads: ExtraHeads | None) -> Iterator[LayerUnit]:
    """Yield the units of a model's extra heads."""
    if heads is None:
        return
    stack = next(name for name, module in model.named_modules() if module is heads)
    for path in heads.units:
        name, module = f"{stack}.{path}", heads.get_submodule(path)
        yield LayerUnit(name, module, stack, tuple(_experts(module, name)))


def _always_reached(model: nn.Module) -> Callable[[str], bool]:
    """Return whether every batch passes through a layer, by the layer's name."""
    base: Any = base_model(model)
    prefixes = [name for name, module in model.named_modules() if module is base]
    prefix = f"{prefixes[0]}." if prefixes and prefixes[0] else ""
    parts, config = parts_of(base), getattr(base, "config", None)
    text = config.get_text_config() if config is not None else None
    crossing = tuple(f".{at}" for at in getattr(text, "cross_attention_layers", None) or ())
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()

    def reached(name: str) -> bool:
        if crossing and name.endswith(crossing):
            return False
        if parts is not None:
            return parts.group(name.removeprefix(prefix).removeprefix("model.")) == "language_model"
        several = bool(getattr(config, "sub_configs", None)) and not getattr(config, "is_encoder_decoder", False)
        return not several or not inside or id(model.get_submodule(name)) in inside

    return reached


def _experts(layer: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a layer that hold the weights of several experts, stacked: ``[E, ., .]``."""
    for name, module in find_experts(layer).items():
        if module is not layer:
            yield f"{prefix}.{name}", module


def _own_embeddings(model: nn.Module) -> nn.Module | None:
    embeddings = input_embeddings(base_model(model))
    if not isinstance(embeddings, nn.Embedding):  # PEFT's wrapper would compute a weight when it is asked for one
        return None
    weight = embeddings._parameters.get("weight")
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return embeddings if uses[id(weight)] == 1 else None


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}
