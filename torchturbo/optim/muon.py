"""Muon for hidden matrices and AdamW for the rest, as one torch optimizer, on plain and on sharded parameters.

The rule for a matrix W [M, K] with gradient G, after Keller Jordan (https://kellerjordan.github.io/posts/muon/), with
the scale and decay of Moonlight (arXiv 2502.16982, equation 4), as ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``:

    B <- mu B + (1 - mu) G                          momentum, a running mean
    N  = mu B + (1 - mu) G                          Nesterov's look ahead
    O  = NewtonSchulz(N)                            singular values to about 1
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(M, K)) O   an update of AdamW's usual RMS, about 0.2

Moonlight writes B <- mu B + G and N = G + mu B. Those are this B and N divided by 1 - mu, and Newton-Schulz divides by
the norm: the two forms are one rule. With the scale, AdamW's learning rate and weight decay serve both kinds.

A fused parameter is several matrices (:mod:`torchturbo.optim.fused`), each with its own O and its own scale.
Orthogonalising needs the whole matrix: doing it to each shard is another optimizer, whose updates depend on the number
of ranks. So the momentum stays on the shards, and N is gathered once, on one rank for each matrix
(:mod:`torchturbo.optim.exchange`). Experts are matrices of their own; those that lie whole on their rank do not travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from torchturbo.optim.exchange import Piece, cut_axis, one_ahead, rounds, shard_sizes
from torchturbo.optim.fused import Fused
from torchturbo.optim.newton_schulz import newton_schulz

MOMENTUM = 0.95
RMS = 0.2
"""Root mean square of an update at learning rate 1, as AdamW's usually is (arXiv 2502.16982, section 2.2)."""


class MuonAdamW(AdamW):
    """Updates the groups with ``use_muon`` by Muon and all others by torch's AdamW.

    Parameters
    ----------
    params
        Parameter groups, such as :func:`torchturbo.optim.groups.parameter_groups` returns. Parameters of a group with
        ``use_muon`` are ``[M, K]``, or ``[E, M, K]`` for a stack of experts.
    lr, weight_decay
        Of both kinds; those of a group hold where it has its own.
    betas, eps, fused
        AdamW's.
    momentum
        Muon's mu.
    layouts
        How parameters are fused, for those that are.
    ns_dtype
        Number format of Newton-Schulz, and of what is exchanged for it. bf16 changes an update by about 2 %, as
        everywhere else (``torch.optim.Muon`` always uses it); fp32 gives the same weights on any number of ranks.

    Raises
    ------
    ValueError
        If a parameter with ``use_muon`` is no matrix or stack of matrices, or is cut along several mesh axes.

    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        fused: bool | None = None,
        momentum: float = MOMENTUM,
        layouts: Mapping[nn.Parameter, Fused] | None = None,
        ns_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._momentum = momentum
        self._layouts: dict[Any, Fused] = dict(layouts or {})
        self.ns_dtype = ns_dtype
        super().__init__([dict(group) for group in params], lr, betas, eps, weight_decay, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ``use_muon`` is False and ``momentum`` the optimizer's where it does not say."""
        param_group.setdefault("use_muon", False)
        param_group.setdefault("momentum", self._momentum)
        super().add_param_group(param_group)
        for parameter in param_group["params"] if param_group["use_muon"] else ():
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon updates matrices, expected [M, K] or [E, M, K], got {list(parameter.shape)}")
            if isinstance(parameter, DTensor):
                cut_axis(parameter)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_momentum": self._momentum, "_layouts": self._layouts, "ns_dtype": self.ns_dtype}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # AdamW's own looks for a step in every state; Muon's has none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A collective where parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._step_muon if group["use_muon"] else self._step_adamw)(group)
        return loss

    def _step_adamw(self, group: dict[str, Any]) -> None:
        # As AdamW.step does for each of its groups; calling it would run the step's hooks a second time.
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        has_complex = self._init_group(group, *lists)  # type: ignore[no-untyped-call]
        options = (
            "lr",
            "weight_decay",
            "eps",
            "amsgrad",
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
        )
        beta1, beta2 = group["betas"]
        settings: dict[str, Any] = {name: group[name] for name in options}
        settings |= {"has_complex": has_complex, "beta1": beta1, "beta2": beta2}
        parameters, gradients, means, squares, most, steps = lists
        adamw(parameters, gradients, means, squares, most, steps, **settings)

    def _step_muon(self, group: dict[str, Any]) -> None:
        lr, decay = float(group["lr"]), group["weight_decay"]
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        # Matrices of one size share a round: none waits for a larger one.
        trained.sort(key=lambda parameter: parameter.shape[-2] * parameter.shape[-1], reverse=True)
        cut: dict[tuple[Any, int], list[DTensor]] = {}
        for parameter in trained:
            axis = cut_axis(parameter) if isinstance(parameter, DTensor) else None
            if axis is None:
                update = orthogonalised(self._ahead(parameter, group["momentum"]), self._layouts.get(parameter))
                _apply(local(parameter), update, lr, decay)
            else:
                cut.setdefault((parameter.device_mesh, axis), []).append(parameter)
        for (mesh, axis), parameters in cut.items():
            pieces = (piece for one in parameters for piece in self._pieces(one, axis, group["momentum"]))
            coming = one_ahead(rounds(pieces, mesh.get_group(axis)))
            for returned in one_ahead(each.work(orthogonalised) for each in coming):
                for piece, update in returned.updates():
                    _apply(piece.weight, update, lr, decay)

    def _ahead(self, parameter: Tensor, momentum: float) -> Tensor:
        """Advance the momentum of this rank's part of a parameter, and return what is to be orthogonalised of it."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        assert parameter.grad is not None
        gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
        buffer.lerp_(gradient.to(buffer), 1 - momentum)
        ahead = gradient.to(buffer).lerp(buffer, momentum).to(self.ns_dtype)
        # Of an offloaded parameter the links and the arithmetic are the accelerator's.
        return ahead.to(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else ahead

    def _pieces(self, parameter: DTensor, axis: int, momentum: float) -> Iterator[Piece]:
        """Yield what of a parameter goes to one rank each: a matrix, or an equal share of the experts that lie here."""
        mesh, dim = parameter.device_mesh, parameter.placements[axis].dim - parameter.ndim  # type: ignore[attr-defined]
        sizes = shard_sizes(parameter.shape[dim], mesh.size(axis))
        layout, shard, weight = self._layouts.get(parameter), self._ahead(parameter, momentum), local(parameter)
        parts = min(mesh.size(axis), shard.shape[0]) if parameter.ndim > 2 else 1
        if parameter.ndim == 2:
            yield Piece(shard, weight, layout, dim, sizes)
        elif parts:
            for some, target in zip(shard.tensor_split(parts), weight.tensor_split(parts), strict=True):
                yield Piece(some, target, layout, dim, sizes)


def _apply(weight: Tensor, update: Tensor, lr: float, decay: float) -> None:
    weight.mul_(1 - lr * decay).add_(update.to(weight), alpha=-lr)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonalised(matrices: Tensor, layout: Fused | None = None) -> Tensor:
    """Return the update of matrices ``[..., M, K]`` at learning rate 1, each linear map on its own."""
    if layout is None:
        return newton_schulz(matrices).mul_(RMS * math.sqrt(max(matrices.shape[-2:])))
    update = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    for part, target in zip(layout.split(matrices), layout.split(update), strict=True):
        target.copy_(layout.apart(orthogonalised(layout.joined(part))))
    return update
