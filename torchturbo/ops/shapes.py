"""How a kernel is put in an operator's place: one function for each operator that fits a kernel to Transformers' modules.

What a module computes stays in the module: its linear layers are called as modules (LoRA wraps them), its weight is read
at each call (a sharded one is only there then), and an argument that the kernel doesn't take goes to the native code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchturbo.objectives.normalise import own_loss_function
from torchturbo.ops.find import ROTARY
from torchturbo.ops.replace import OURS, Attribute, Handle, is_ours, replace_forward, with_globals

if TYPE_CHECKING:
    from torchturbo.ops.find import Site

Norm = Callable[[Tensor, Tensor, float, float, bool], Tensor]
"""(x [..., H], weight [H], eps, offset, cast_first) -> [..., H], ``torchturbo.ops.find.rms_norm`` made fast."""
Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q [B, N, T, D], k [B, K, T, D], cos, sin [B or 1, T, D]) -> rotated q and k."""
Gated = Callable[[Tensor, Tensor], Tensor]
"""(gate [..., I], up [..., I]) -> silu(gate) * up."""
TokenSum = Callable[[Tensor, Tensor, int], Tensor]
"""(logits [N, V] in float32, targets [N], the label to ignore) -> the summed cross-entropy, a scalar."""


def rms_norm(sites: Sequence[Site], kernel: Norm) -> list[Handle]:
    """Give norms a kernel; a result has the format that the module's own code gives it."""
    forwards: dict[tuple[float, float, bool], Callable[..., Tensor]] = {}

    def forward_of(eps: float, offset: float, cast_first: bool) -> Callable[..., Tensor]:
        def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
            weight: Any = self.weight
            if cast_first:  # then a float32 weight makes a float32 result
                hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, weight.dtype))
            return kernel(hidden_states, weight, eps, offset, cast_first)

        return forward

    handles: list[Handle] = []
    for site in sites:
        key = site.facts["eps"], site.facts["offset"], site.facts["cast_first"]
        if key not in forwards:
            forwards[key] = forward_of(*key)
        handles.append(replace_forward(site.module, forwards[key]))
    return handles


def rope(sites: Sequence[Site], kernel: Rotary) -> list[Handle]:
    """Let attentions rotate with a kernel: each gets its class's forward with another ``apply_rotary_pos_emb``."""
    forwards: dict[Any, Any] = {}

    def rotary_of(native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = not args and kwargs.get("unsqueeze_dim", 1) == 1 and kwargs.keys() <= {"unsqueeze_dim"}
            if not plain or q.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
                return native(q, k, cos, sin, *args, **kwargs)
            dtype = torch.promote_types(q.dtype, cos.dtype)
            return kernel(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype))

        return apply

    handles: list[Handle] = []
    for site in sites:
        function = type(site.module).forward
        if function not in forwards:
            forwards[function] = with_globals(function, {ROTARY: rotary_of(site.facts["native"])})
        handles.append(replace_forward(site.module, forwards[function]))
    return handles


def swiglu(sites: Sequence[Site], kernel: Gated) -> list[Handle]:
    """Give gated MLPs a kernel between their linear layers."""

    def split(self: nn.Module, x: Tensor) -> Tensor:
        module: Any = self
        result: Tensor = module.down_proj(kernel(module.gate_proj(x), module.up_proj(x)))
        return result

    def fused(self: nn.Module, x: Tensor) -> Tensor:
        module: Any = self
        result: Tensor = module.down_proj(kernel(*module.gate_up_proj(x).chunk(2, -1)))
        return result

    return [replace_forward(site.module, fused if site.facts["fused"] else split) for site in sites]


def cross_entropy(sites: Sequence[Site], kernel: TokenSum) -> list[Handle]:
    """Let the model's loss function sum the tokens' losses with a kernel; the normaliser then wraps that function."""
    return [LossFunction(site.module, kernel) for site in sites]


class LossFunction:
    """Transformers' causal-LM loss with another cross-entropy in it, on one model.

    It names what it stands for in ``replaces``. The normaliser may lie over it when it is removed; then it computes
    what it stands for.
    """

    def __init__(self, base: Any, kernel: TokenSum) -> None:
        loss = own_loss_function(base)
        native = getattr(loss, "replaces", loss)
        self._used = True

        def cross_entropy(
            source: Tensor, target: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100, **kwargs: Any
        ) -> Tensor:
            total = kernel(source, target, ignore_index)
            if num_items_in_batch is None:  # Transformers' mean over the batch's own tokens
                return total / target.ne(ignore_index).sum()
            return total / (
                num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
            )

        faster = with_globals(native, {"fixed_cross_entropy": cross_entropy})

        @wraps(native)
        def loss_function(*args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = (faster if self._used else native)(*args, **kwargs)
            return result

        loss_function.replaces = native  # type: ignore[attr-defined]
        OURS.add(loss_function)
        self._attribute = Attribute(base, "_loss_function", loss_function)

    def remove(self) -> None:
        """Put the native function back."""
        self._used = False
        self._attribute.remove()


def forget(base: nn.Module) -> None:
    """Take what was installed out of a copy of a model, for which there are no handles."""
    for module in base.modules():
        if is_ours(vars(module).get("forward")):  # only a module without a forward of its own gets one
            del vars(module)["forward"]
    loss: Any = vars(base).get("_loss_function")
    if is_ours(loss):
        del vars(base)["_loss_function"]
        if own_loss_function(base) is not loss.replaces:
            vars(base)["_loss_function"] = loss.replaces
