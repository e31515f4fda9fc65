"""Operators that Transformers itself offers in several implementations: its switches of attention and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchturbo.ops.replace import Handle, replace_forward

if TYPE_CHECKING:
    from torchturbo.ops.find import Site

ATTENTION, EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"
"""Where a model's configuration holds what was chosen."""


def flash_attention_2(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Switch attention to FlashAttention (on an NPU Transformers calls ``npu_fusion_attention`` under this name)."""
    return _attention(sites, situation, "flash_attention_2")


def sdpa(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Switch attention to torch.nn.functional.scaled_dot_product_attention."""
    return _attention(sites, situation, "sdpa")


def _attention(sites: Sequence[Site], situation: Any, name: str) -> list[Handle]:
    base = situation.base
    kept = [Kept(config, ATTENTION) for config in configurations(base)]
    base.set_attn_implementation(name)
    return [*kept]


def grouped_mm(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Switch experts to grouped matrix products, in autocast's format.

    Transformers' function multiplies in the weights' own format, so float32 weights under bfloat16 autocast would be
    multiplied in float32: the weights are cast as autocast casts a linear layer's.
    """
    return experts(sites, _grouped_mm_forward)


def experts(sites: Sequence[Site], forward: Any) -> list[Handle]:
    """Give expert modules a forward ``(self, hidden_states, top_k_index, top_k_weights)``."""
    return [replace_forward(site.module, forward) for site in sites]


def _grouped_mm_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    result: Tensor = grouped_mm_experts_forward(in_autocast_format(self), *args, **kwargs)
    return result


def in_autocast_format(module: nn.Module) -> Any:
    """Return a module whose weights are seen in the format of the autocast around it; without one, itself."""
    weight = next(module.parameters())
    if not torch.is_autocast_enabled(weight.device.type):
        return module
    dtype = torch.get_autocast_dtype(weight.device.type)
    cast = {name: value.to(dtype) for name, value in module.named_parameters(recurse=False)}
    return View(module, cast)


class View:
    """A module some of whose attributes are replaced for one call."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        self._module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Kept:
    """A value in a configuration's own dictionary that a switch is about to change."""

    def __init__(self, config: Any, name: str) -> None:
        self._own, self._name = vars(config), name
        self._before = self._own.get(name, self)

    def remove(self) -> None:
        """Put the value back."""
        if self._before is self:
            self._own.pop(self._name, None)
        else:
            self._own[self._name] = self._before


def configurations(base: nn.Module) -> Iterator[Any]:
    """Yield every configuration in a model once: the parts of a multimodal model have their own."""
    seen: set[int] = set()
    for module in base.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield config
