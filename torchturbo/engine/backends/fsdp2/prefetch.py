"""Prefetch as data: which units of sharding a unit gathers ahead of their use, and the lists put onto the units.

A unit of sharding is what FSDP2 gathers in one all-gather: a layer without its experts, or the experts of a layer.
A layer's own hook runs before it computes; what stands in its list is asked for at that moment, in the list's order,
and arrives while the layer computes. The lists are made from names alone: this module imports torch where it touches
a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.engine.backends.fsdp2.units import Units

NATIVE, WITH_LAYER, LOOKAHEAD = "native", "expert_with_layer", "expert_lookahead"
"""Strategies that lists can be made from; ``auto`` is resolved to one of them first."""
BOTH_WAYS = "forward_backward"


class Layer(NamedTuple):
    """One layer as prefetch sees it."""

    name: str
    """Its name in the model."""
    experts: tuple[str, ...] = ()
    """Names of its experts' units, in the order in which they compute."""
    stack: str = ""
    """The list of modules that it stands in."""


class Prefetch(NamedTuple):
    """What one unit gathers ahead in each pass, in the order in which it is asked for."""

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


def prefetch_lists(
    layers: Sequence[Layer], strategy: str, direction: str, forward_depth: int, backward_depth: int
) -> dict[str, Prefetch]:
    """Return the lists of every unit, the layers' and the experts', by name and in forward order.

    With E the experts of a layer L and depth d, layer i of a chain asks in forward for

    * ``expert_with_layer``: ``E_i, L_i+1, E_i+1, ..., L_i+d, E_i+d``;
    * ``expert_lookahead``: the same without ``E_i+d``, which ``E_i`` asks for when it computes. So attention is
      computed with one set of experts fewer in memory. A layer without experts asks for them itself.

    Backward is the mirror image with ``backward_depth``, and is left to FSDP2 with the direction ``forward``.
    Each list begins with the layer's own experts: they are needed first, and FSDP2 serves gathers in the order in
    which they were asked for. A chain is the layers of one stack: a vision tower's last layer asks for nothing of the
    language model, for a batch need not run both. ``native`` asks for nothing: FSDP2's own order holds.

    Parameters
    ----------
    layers
        The layers in the order in which they run.
    strategy
        ``native``, ``expert_with_layer`` or ``expert_lookahead``.
    direction
        ``forward`` or ``forward_backward``.
    forward_depth, backward_depth
        How many layers ahead, at least 1.

    """
    forward: dict[str, tuple[str, ...]] = {}
    backward: dict[str, tuple[str, ...]] = {}
    if strategy != NATIVE:
        for _, stack in groupby(layers, key=lambda layer: layer.stack):
            chain = list(stack)
            forward |= _one_way(chain, forward_depth, strategy)
            if direction == BOTH_WAYS:
                mirrored = [layer._replace(experts=layer.experts[::-1]) for layer in reversed(chain)]
                backward |= _one_way(mirrored, backward_depth, strategy)
    names = [name for layer in layers for name in (layer.name, *layer.experts)]
    return {name: Prefetch(forward.get(name, ()), backward.get(name, ())) for name in names}


def _one_way(chain: Sequence[Layer], depth: int, strategy: str) -> dict[str, tuple[str, ...]]:
    """Return what each unit of a chain asks for; the chain's order is that in which its layers run."""
    lists: dict[str, tuple[str, ...]] = {}
    for at, layer in enumerate(chain):
        ahead = chain[at + 1 : at + 1 + depth]
        # What lies less far ahead than the depth was asked for by an earlier layer's experts already, or, at the
        # beginning of the chain, has none to ask for it.
        later = ahead[-1].experts if strategy == LOOKAHEAD and layer.experts and len(ahead) == depth else ()
        now = [*layer.experts, *(name for one in ahead for name in (one.name, *one.experts))]
        lists[layer.name] = tuple(now[: len(now) - len(later)])
        if later:
            lists[layer.experts[0]] = later
    return lists


# ---- on a model ----


def layers_of(units: Units) -> list[Layer]:
    """Return a model's layers as prefetch sees them, in the order in which they run."""
    return [Layer(one.name, tuple(name for name, _ in one.experts), one.stack) for one in units.layers]


def apply_lists(units: Units, lists: Mapping[str, Prefetch]) -> None:
    """Put lists onto the units of a sharded model, by their names; a unit without a list keeps FSDP2's own order."""
    modules: dict[str, Any] = {}
    for layer in units.layers:
        modules |= {layer.name: layer.module, **dict(layer.experts)}
    for name, (forward, backward) in lists.items():
        if forward:
            _FirstForward(modules[name], [modules[target] for target in forward])
        if backward:
            modules[name].set_modules_to_backward_prefetch([modules[target] for target in backward])


def clear_lists(model: nn.Module) -> None:
    """Take every list out of a model again."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, _FirstForward):
                hook.handle.remove()
        for direction in ("forward", "backward"):
            if set_list := getattr(module, f"set_modules_to_{direction}_prefetch", None):
                set_list([])


class _FirstForward:
    """Sets a unit's forward list, and takes it away while backward recomputes the unit.

    Activation checkpointing runs modules forward once more within backward, their hooks included. With the list in
    force then, units that backward has left behind would be gathered again, for nothing.
    """

    def __init__(self, unit: Any, targets: list[Any]) -> None:
        self.unit, self.targets, self.in_force = unit, targets, True
        unit.set_modules_to_forward_prefetch(targets)
        self.handle = unit.register_forward_pre_hook(self, prepend=True)  # before FSDP2's own, which reads the list

    def __call__(self, *_: Any) -> None:
        import torch

        first = torch._C._current_graph_task_id() == -1  # no backward is running; FSDP2 asks the same way
        if first != self.in_force:
            self.unit.set_modules_to_forward_prefetch(self.targets if first else [])
            self.in_force = first
