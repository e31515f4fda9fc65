"""Operators that Transformers itself offers in several implementations: its switches of attention and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchturbo.ops.replace import Handle, remove_all, replace_forward

if TYPE_CHECKING:
    from torchturbo.ops.find import Site

ATTENTION, EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"
"""Where a model's configuration holds what was chosen."""


def flash_attention_2(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Switch attention to FlashAttention (on an NPU Transformers calls ``npu_fusion_attention`` under this name)."""
    body: nn.Module = situation.base.base_model
    before = _attention(sites, situation, "flash_attention_2")
    chosen = [Kept(config, ATTENTION) for config in configurations(situation.base)]
    outside = OutsideAutocast(sites[0].module, before, chosen)
    return [
        *before,
        body.register_forward_pre_hook(outside.enter),
        body.register_forward_hook(outside.leave, always_call=True),
    ]


def sdpa(sites: Sequence[Site], situation: Any) -> list[Handle]:
    """Switch attention to torch.nn.functional.scaled_dot_product_attention."""
    return [*_attention(sites, situation, "sdpa")]


def _attention(sites: Sequence[Site], situation: Any, name: str) -> list[Kept]:
    base = situation.base
    kept = [Kept(config, ATTENTION) for config in configurations(base)]
    base.set_attn_implementation(name)
    return kept


class OutsideAutocast:
    """Hooks of a backbone that attends as before the switch where it computes in float32, which FlashAttention refuses.

    Training keeps float32 weights and runs under autocast; generation or a forward of the user's may run outside of it.
    """

    def __init__(self, attention: nn.Module, before: Sequence[Kept], chosen: Sequence[Kept]) -> None:
        self.attention, self.before, self.chosen = attention, before, chosen

    def enter(self, body: nn.Module, args: Any) -> None:
        """Switch back for this forward if nothing will cast its heads: Transformers casts them to a layer's format."""
        weight = next(layer for layer in self.attention.modules() if isinstance(layer, nn.Linear)).weight
        if isinstance(weight, DTensor):
            return  # sharded: it is gathered in the format of the run, which nothing else casts to
        if weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type):
            remove_all(self.before)

    def leave(self, body: nn.Module, args: Any, output: Any) -> None:
        """Switch to FlashAttention again, also after an error."""
        remove_all(self.chosen)


def forget(base: Any) -> None:
    """Undo the switch of attention in a copy of a model, for which there are no handles."""
    body = getattr(base, "base_model", base)  # a module of any kind may be asked to undo what it never had
    for hooks in (body._forward_pre_hooks, body._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(outside := getattr(hook, "__self__", None), OutsideAutocast):
                del hooks[key]
                body._forward_hooks_always_called.pop(key, None)
                remove_all(outside.before)


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
        self._config, self._name = config, name
        self._before = vars(config).get(name, self)

    def remove(self) -> None:
        """Put the value back."""
        if self._before is self:
            vars(self._config).pop(self._name, None)
        else:
            vars(self._config)[self._name] = self._before


def configurations(base: nn.Module) -> Iterator[Any]:
    """Yield every configuration in a model once: the parts of a multimodal model have their own."""
    seen: set[int] = set()
    for module in base.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield config
