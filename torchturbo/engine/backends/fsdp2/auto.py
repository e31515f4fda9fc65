"""The choice behind ``prefetch_strategy: auto``: a strategy, and the reason that the log gives for it."""

from __future__ import annotations

from typing import NamedTuple

from torchturbo.engine.backends.fsdp2.prefetch import LOOKAHEAD, NATIVE, WITH_LAYER
from torchturbo.observe.size import size


class Choice(NamedTuple):
    """A strategy and why it was chosen."""

    strategy: str
    reason: str


def choose_strategy(*, depth: int, ep_size: int, expert_bytes: int, other_bytes: int) -> Choice:
    """Return the strategy that suits a model's layout.

    FSDP2's own order overlaps as long as the CPU runs ahead of the device: the next unit is asked for while this one
    computes. All-to-all dispatch makes the CPU wait for the routing of each layer, so with expert parallelism nothing
    is asked for in time unless lists say so (https://github.com/pytorch/torchtitan/issues/1968). Which of the two lists:
    experts that are larger than the rest of their layer dominate what is held, and are asked for one gather later.

    Parameters
    ----------
    depth
        The larger of the depths that are in force; 1 is what FSDP2 does by itself.
    ep_size
        Ranks among which each layer's experts are divided.
    expert_bytes, other_bytes
        What one rank gathers of a layer: its experts' share, and all else. The share is 0 for a dense model, and
        where every rank keeps experts of its own whole.

    """
    if depth == 1 and ep_size == 1:
        return Choice(NATIVE, "without expert parallelism FSDP2's own order overlaps one layer ahead")
    asked = "layers wait for routing" if ep_size > 1 else f"a depth of {depth} was asked for"
    if not expert_bytes:
        why = "experts stay whole on their ranks" if ep_size > 1 else "the model is dense"
        return Choice(WITH_LAYER, f"{asked}; {why}: layers only")
    sizes = f"a layer gathers {size(expert_bytes)} of experts, {size(other_bytes)} else"
    return Choice(LOOKAHEAD if expert_bytes > other_bytes else WITH_LAYER, f"{asked}; {sizes}")
