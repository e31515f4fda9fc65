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
of ranks. So the momentum stays on the shards, one all-gather a matrix brings the whole N to every rank, and each takes
its part of O back without a word. Experts are matrices of their own and are gathered by none but their own dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from torchturbo.optim.fused import Fused
from torchturbo.optim.newton_schulz import newton_schulz

MOMENTUM = 0.95
RMS = 0.2
"""Root mean square of an update at learning rate 1, as AdamW's usually is (arXiv 2502.16982, section 2.2)."""
T = TypeVar("T")


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
        Number format of Newton-Schulz, and of the all-gather before it. bf16 changes an update by about 2 %, as
        everywhere else (``torch.optim.Muon`` always uses it); fp32 gives the same weights on any number of ranks.

    Raises
    ------
    ValueError
        If a parameter with ``use_muon`` has less than two dimensions.

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
        for parameter in param_group["params"]:
            if param_group["use_muon"] and parameter.ndim < 2:
                raise ValueError(f"Muon updates matrices, expected [M, K] or [E, M, K], got {list(parameter.shape)}")

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
        gathered = ((parameter, self._gathered(parameter, group["momentum"])) for parameter in trained)
        for parameter, whole in one_ahead(gathered):
            weight, layout = local(parameter), self._layouts.get(parameter)
            update = self._shard(orthogonalised(local(whole), layout), whole, parameter)
            weight.mul_(1 - lr * decay).add_(update.to(weight), alpha=-lr)

    def _gathered(self, parameter: Tensor, momentum: float) -> Tensor:
        """Advance a parameter's momentum on its shard, and begin to gather the matrices to orthogonalise."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        assert parameter.grad is not None
        gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
        buffer.lerp_(gradient.to(buffer), 1 - momentum)
        ahead = gradient.to(buffer).lerp(buffer, momentum).to(self.ns_dtype)
        if not isinstance(parameter, DTensor):
            return ahead
        placements = [_kept(placement, parameter.ndim) for placement in parameter.placements]
        shards = _sharded(ahead, parameter.device_mesh, parameter.placements, parameter)
        return shards.redistribute(placements=placements, async_op=True)

    def _shard(self, update: Tensor, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of whole matrices, cut out of what it has."""
        if not isinstance(parameter, DTensor):
            return update
        assert isinstance(whole, DTensor)
        found = _sharded(update, whole.device_mesh, whole.placements, parameter)
        return local(found.redistribute(placements=parameter.placements))


def _kept(placement: Placement, ndim: int) -> Placement:
    """Return how one mesh axis places a tensor while it is orthogonalised: a stack of experts may stay apart."""
    return placement if ndim > 2 and getattr(placement, "dim", -1) in range(ndim - 2) else Replicate()


def _sharded(tensor: Tensor, mesh: Any, placements: Any, like: DTensor) -> DTensor:
    """Return a local tensor as a DTensor; it goes to the mesh's device, where an offloaded one is worked on."""
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


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


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield each item once the one after it has been made: its gather then runs during the work on this one."""
    waiting: list[T] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting
