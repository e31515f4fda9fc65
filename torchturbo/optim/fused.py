"""Which parameters hold several linear maps in one tensor, and how: the layouts of Transformers' families as data.

Muon works on linear maps. A model that keeps gate and up projection, or query, key and value, in one tensor for speed
is the same function as one that keeps them apart, and trains the same here: each is orthogonalised on its own. Keller
Jordan found this better for query, key and value (https://kellerjordan.github.io/posts/muon/), Megatron-LM splits them
by default (``muon_split_qkv``), InternLM/xtuner splits both (pull requests 2001 and 2030).

Add a family: one row of :data:`LINEARS`. A tensor that no row knows is one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Fused(NamedTuple):
    """How several matrices lie in one: along ``dim`` come ``groups`` runs, each with ``sizes`` rows (or columns) of each.

    ``Fused(-2, 1, (I, I))`` is gate rows, then up rows; ``Fused(-1, I, (1, 1))`` is gate and up columns in turn;
    ``Fused(-2, heads, (D, D, D))`` is query, key and value of one head, then those of the next.
    """

    dim: int
    """-2 where rows are outputs, -1 where the matrix is stored transposed."""
    groups: int
    sizes: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape can have the layout."""
        return shape[self.dim] == self.groups * sum(self.sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return views of the matrices in ``[..., M, K]``: the run of each group is a dimension of its own, ``dim - 1``."""
        runs: Tensor = tensor.unflatten(self.dim, (self.groups, sum(self.sizes)))  # type: ignore[no-untyped-call]
        return list(torch.split(runs, list(self.sizes), dim=self.dim))

    def joined(self, part: Tensor) -> Tensor:
        """Return one of :meth:`split`'s views as a plain matrix ``[..., m, K]`` or ``[..., M, k]``, copied if need be."""
        return part.flatten(self.dim - 1, self.dim)

    def apart(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the shape that :meth:`split` gave it."""
        found: Tensor = matrix.unflatten(self.dim, (self.groups, -1))  # type: ignore[no-untyped-call]
        return found


Layout = Callable[[Any, nn.Parameter], Fused]
"""The layout of a linear layer's weight, from the module that owns the layer."""


def _halves(owner: Any, weight: nn.Parameter) -> Fused:
    return Fused(-2, 1, (weight.shape[-2] // 2,) * 2)


def _queries_keys_values(owner: Any, weight: nn.Parameter) -> Fused:
    queries = getattr(owner, "q_dim", weight.shape[-2] // 3)  # of EXAONE's tower, whose keys are fewer
    return Fused(-2, 1, (queries, *((weight.shape[-2] - queries) // 2,) * 2))


def _column_thirds(owner: Any, weight: nn.Parameter) -> Fused:
    return Fused(-1, 1, (weight.shape[-1] // 3,) * 3)


def _queries_then_keys_values(owner: Any, weight: nn.Parameter) -> Fused:
    keys = owner.num_key_value_heads * owner.head_dim
    return Fused(-2, 1, (weight.shape[-2] - 2 * keys, keys, keys))


def _head_by_head(owner: Any, weight: nn.Parameter) -> Fused:
    size = owner.head_size if hasattr(owner, "head_size") else owner.head_dim
    return Fused(-2, weight.shape[-2] // (3 * size), (size,) * 3)


def _delta_net(owner: Any, weight: nn.Parameter) -> Fused:
    return Fused(-2, 1, (owner.key_dim, owner.key_dim, owner.value_dim))


LINEARS: tuple[tuple[str, str, Layout], ...] = (
    (".*", "gate_up_proj", _halves),
    (r"GraniteMoe(Shared|Hybrid)MLP|GraniteMoe\w*MoE|JetMoeMoE", "input_linear", _halves),
    ("Phi3Attention|Phi4MultimodalAttention", "qkv_proj", _queries_then_keys_values),
    ("DbrxAttention", "Wqkv", _queries_then_keys_values),
    ("LLaDA2MoeAttention", "query_key_value", _queries_then_keys_values),
    ("MptAttention", "Wqkv", _queries_keys_values),
    ("GPT2Attention", "c_attn", _column_thirds),
    ("GPTNeoXAttention|BloomAttention", "query_key_value", _head_by_head),
    (r"\w*VisionAttention|VisionAttention", "qkv", _queries_keys_values),
    (r"\w*GatedDeltaNet", "in_proj_qkv", _delta_net),
)
"""Linear layers: (class of the module that owns it, as a pattern; its name there; layout)."""

TRANSPOSED_EXPERTS = "Llama4TextExperts"
"""Experts that Transformers' own marks (``is_transposed``) do not describe, stored [E, in, out]; as a pattern."""
INTERLEAVED_EXPERTS = "GptOssExperts"
"""Experts whose gate and up columns come in turn, where ``is_concatenated`` is not there to say so."""


def fused_linear(owner: nn.Module | None, name: str, weight: nn.Parameter) -> Fused | None:
    """Return how the weight of a linear layer is fused, by the module that owns the layer and its name there."""
    for classes, attribute, layout in LINEARS:
        if name == attribute and owner is not None and is_class(owner, classes):
            found = layout(owner, weight)
            return found if found.fits(tuple(weight.shape)) else None
    return None


def fused_experts(experts: nn.Module, name: str, weight: nn.Parameter) -> Fused | None:
    """Return how a stack of experts ``[E, M, K]`` is fused, by the marks that Transformers sets on the module."""
    if name != "gate_up_proj" or not getattr(experts, "has_gate", True):
        return None
    dim = -1 if getattr(experts, "is_transposed", is_class(experts, TRANSPOSED_EXPERTS)) else -2
    half = weight.shape[dim] // 2
    concatenated = getattr(experts, "is_concatenated", not is_class(experts, INTERLEAVED_EXPERTS))
    found = Fused(dim, 1, (half, half)) if concatenated else Fused(dim, half, (1, 1))
    return found if found.fits(tuple(weight.shape)) else None


def is_class(module: nn.Module, pattern: str) -> bool:
    """Return whether a module is of a class whose name fits, or of a subclass of it (a sharded one is)."""
    return any(re.fullmatch(pattern, kind.__name__) for kind in type(module).__mro__)
