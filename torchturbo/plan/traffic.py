"""What FSDP2 holds beside the shards: gathered units, gradients on their way, and what crosses between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchturbo.engine.backends.fsdp2.prefetch import Layer, Prefetch
from torchturbo.plan.memory import Weight


class Passing(NamedTuple):
    """Bytes that a rank holds for a while, at most."""

    gathered: int
    """Whole parameters of the units that are in use or were asked for, in the format of the computation, and the
    buffer of one all-gather."""
    reducing: int
    """Whole gradients of the unit that backward is in, and the buffer of its reduce-scatter."""


def passing(
    weights: Sequence[Weight],
    layers: Sequence[Layer],
    lists: Mapping[str, Prefetch],
    *,
    itemsize: int | None,
    reshard: bool,
) -> Passing:
    """Return what a rank holds while units are gathered and reduced.

    The root's unit stays whole from forward to backward. A layer is whole with its experts and what its list names,
    or, without a list, with the one next to it, which FSDP2's own order asks for. Without ``reshard`` all are.

    Parameters
    ----------
    itemsize
        Bytes of an element in the format of the computation; None where parameters are gathered in their own.
    reshard
        Whether a unit is freed after its forward.

    """
    whole: dict[str, int] = {}
    reduced: dict[str, int] = {}
    for weight in weights:
        size = weight.gathered * (itemsize or weight.itemsize)
        whole[weight.unit] = whole.get(weight.unit, 0) + size
        if weight.trained:  # the gradient in that format, and reduce-scatter's input in fp32
            reduced[weight.unit] = reduced.get(weight.unit, 0) + size + weight.gathered * weight.itemsize
    buffer, root = max(whole.values(), default=0), whole.pop("", 0)
    if not reshard:
        return Passing(root + sum(whole.values()) + buffer, max(reduced.values(), default=0))
    windows = [sum(whole.get(name, 0) for name in names) for names in _windows(layers, lists)]
    inner = max([*windows, *whole.values()], default=0)
    return Passing(root + inner + buffer, max(reduced.values(), default=0))


def _windows(layers: Sequence[Layer], lists: Mapping[str, Prefetch]) -> list[set[str]]:
    """Return the units that are whole at once: a layer, its experts, and what they ask for, in each pass."""
    windows = []
    for at, layer in enumerate(layers):
        own = [layer.name, *layer.experts]
        for way, following in (("forward", layers[at + 1 : at + 2]), ("backward", layers[max(0, at - 1) : at])):
            asked = {name for unit in own if unit in lists for name in getattr(lists[unit], way)}
            unasked = {following[0].name, *following[0].experts} if following and not asked else set()
            windows.append({*own, *asked, *unasked})
    return windows


class Traffic(NamedTuple):
    """Bytes that arrive at one node in an optimizer step, from the other nodes."""

    now: int
    """Sharded over all ranks: parameters are gathered for each forward and backward, gradients are reduced each time."""
    hybrid: int
    """A replica in each node: one sum of the gradients over the nodes a step."""


def traffic(
    weights: Sequence[Weight], nodes: int, micro_batches: int, *, itemsize: int | None, gathers: int
) -> Traffic:
    """Return what arrives at a node in one optimizer step, by the volume of ring collectives.

    A node needs the ``(n - 1) / n`` of each parameter that the other nodes hold, for each of the ``gathers`` of a
    micro-batch, and takes part in a reduce-scatter of the same share in fp32. With a replica in each node there is one
    all-reduce of the gradients over the nodes: twice the share (Thakur et al., 2005).
    """
    share = (nodes - 1) / nodes
    whole = sum(weight.numel * (itemsize or weight.itemsize) for weight in weights)
    gradients = sum(weight.numel * weight.itemsize for weight in weights if weight.trained)
    now = micro_batches * share * (gathers * whole + gradients)
    return Traffic(round(now), round(2 * share * gradients))
