"""Attention of a model whose ranks share sequences: whole sequences with a part of the heads (DeepSpeed-Ulysses).

Transformers' registry of attention functions gets one more, which exchanges parts of sequences for parts of heads,
calls the attention that the model would have called, and exchanges back. https://arxiv.org/abs/2309.14509
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchturbo.ops.replace import innermost
from torchturbo.ops.switches import View
from torchturbo.parallel.all_to_all import exchange
from torchturbo.parallel.attention_masks import FullMasks

NAME = "torchturbo_ulysses"
"""Name of the function in Transformers' registry. The registry of masks does not know it, so models make none."""
SHARED = "torchturbo_micro_batch"
"""Keyword that takes a :class:`MicroBatch` through a model's forward to its attentions, also when it is recomputed."""
REGISTRY, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
"""Global names by which Transformers' models know the registry, and the attention of their own file."""


@dataclass
class MicroBatch:
    """What the attentions of one forward must know of the sequences that they see a part of."""

    group: dist.ProcessGroup
    size: int
    rank: int
    rows: int
    length: int
    """Tokens of a sequence, S."""
    padded: int
    """S, rounded up to a multiple of the ranks."""
    positions: Tensor
    """``position_ids`` [B or 1, padded]; they count on where the sequence is padded."""
    masks: FullMasks
    inner: str
    """Name of the attention that runs on whole sequences."""
    generators: list[tuple[Any, Tensor]] = field(default_factory=list)
    """States of the random number generators that this forward replaced."""

    @property
    def local(self) -> int:
        """Return how many tokens of each sequence this rank computes."""
        return self.padded // self.size

    @property
    def part(self) -> slice:
        """Return the positions of the padded sequence that this rank computes."""
        return slice(self.rank * self.local, (self.rank + 1) * self.local)

    def heads(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the entries of this rank's heads."""
        return tensor.chunk(self.size, axis)[self.rank]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend over whole sequences with a part of the heads, as Transformers' attention functions are called.

    Parameters
    ----------
    module
        The attention that calls.
    query, key, value
        [B, H, S / n, D], [B, K, S / n, D], [B, K, S / n, E] of this rank's tokens, rotated already; n ranks, H % n = 0.
    attention_mask
        None: masks are made for the whole micro-batch.

    Returns
    -------
    tuple
        The output [B, S / n, H, E], and None for the weights, which no rank has for all heads.

    """
    batch: MicroBatch | None = kwargs.pop(SHARED, None)
    name = type(module).__name__
    if batch is None:
        raise RuntimeError(
            f"{name} was called past the model that was prepared for sequence parallelism: call that model"
        )
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise RuntimeError(f"{name} made a mask or a bias of its own, of a part of the sequence only; use sp_size 1")
    keys = key.shape[1]
    repeats = batch.size // math.gcd(keys, batch.size)  # since n divides H, K * repeats does too
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = exchange((query, key, value), batch.group, scatter=1, gather=2)
    mask = batch.masks.mask(batch.inner, kwargs.get("sliding_window"), query)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
        mask = batch.heads(mask, 1)
    if "position_ids" in kwargs:  # kernels for packed rows find the documents by them
        kwargs["position_ids"] = batch.positions
    if isinstance(sinks := kwargs.get("s_aux"), Tensor):
        kwargs["s_aux"] = batch.heads(sinks, 0)
    seen = _with_own_heads(module, batch, query.shape[1] // key.shape[1])
    output, _ = _inner(module, batch.inner)(seen, query, key, value, mask, **kwargs)
    return exchange((output,), batch.group, scatter=1, gather=2)[0], None


def _with_own_heads(module: nn.Module, batch: MicroBatch, groups: int) -> View:
    """Return an attention as its function should see it: with this rank's heads and the implementation that runs."""
    values: dict[str, Any] = {"num_key_value_groups": groups}
    if isinstance(sinks := getattr(module, "sinks", None), Tensor):
        values["sinks"] = batch.heads(sinks, 0)
    if (config := getattr(module, "config", None)) is not None:
        values["config"] = View(config, {"_attn_implementation": batch.inner})
    return View(module, values)


def _inner(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the attention function that a module would have called under a name."""
    names = attention_globals(type(module))
    return names[EAGER] if name == "eager" else names[REGISTRY][name]  # type: ignore[no-any-return]


def attention_globals(kind: type) -> dict[str, Any]:
    """Return the global names of the code by which a class calls the registry of attention functions; none without."""
    for base in kind.__mro__:
        for value in vars(base).values():
            if inspect.isfunction(value) and REGISTRY in (plain := innermost(value)).__code__.co_names:
                return plain.__globals__
    return {}
