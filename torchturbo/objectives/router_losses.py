"""The losses of routers: the load-balancing loss that keeps experts evenly used, and the z-loss that keeps logits small.

For one layer, over the T tokens of a micro-batch that are no padding (whole, also where ranks share its sequences),
with E experts of which a token meets the k of the highest scores, bias and groups of experts left aside:

* ``aux = E * sum_i f_i * P_i``: f_i is expert i's share of the k T choices, a constant to the gradient; P_i the mean of
  the scores, which are made to sum to 1 for each token. 1 where all experts are used alike. Switch Transformer,
  https://arxiv.org/abs/2101.03961, with the 1/k of Megatron-LM's ``moe_utils.py``.
* ``z = mean_x logsumexp(logits_x)^2``. ST-MoE, https://arxiv.org/abs/2202.08906.

The loss takes the sum over layers and the mean over micro-batches and data-parallel ranks; the metrics are means over
layers, as Megatron-LM logs them. All of it is computed in float32.

Logits are taken from the routers while the model runs forward in training, never while a layer is recomputed. Under
reentrant checkpointing that first pass has no graph: the losses are then differentiated down to the logits, and the
gradient enters the second pass where the router's logits are computed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchturbo.objectives.documents import layout_of
from torchturbo.objectives.normalise import Normaliser, Term
from torchturbo.objectives.routers import Router, Score, logits_of
from torchturbo.objectives.taps import Taps
from torchturbo.ops.replace import Handle, remove_all
from torchturbo.parallel.replay import recomputing, remember
from torchturbo.parallel.sequence_inputs import part
from torchturbo.parallel.ulysses import SHARED, MicroBatch

AUX, Z = "moe_aux_loss", "moe_z_loss"
"""Names of the terms, and of their metrics."""
OWN = "output_router_logits"
"""Argument of a forward, and setting of a model, that asks for the model's own auxiliary loss."""


@dataclass
class Held:
    """What the passes through a checkpointed call share of one router's call in it."""

    leaf: Tensor | None = None
    """The logits of a first pass that had no graph; their gradient goes into the second one."""


class Taken(NamedTuple):
    """The logits of one call of a router, [..., E]."""

    router: Router
    logits: Tensor


class Losses(NamedTuple):
    """This rank's shares of the two losses, summed over the calls of all routers; scalars."""

    aux: Tensor
    z: Tensor


def router_losses(
    calls: Sequence[tuple[Tensor, Score, int]], valid: Tensor, group: dist.ProcessGroup | None = None
) -> Losses:
    """Return the losses of all routers.

    Parameters
    ----------
    calls
        For each call of a router its logits [T, E], their score and k.
    valid
        [T], which of this rank's tokens are no padding.
    group
        The ranks that share the micro-batch: this rank's losses are then its shares, which add up to the whole. One
        collective for all layers; every rank calls this with as many calls.

    """
    with torch.no_grad():
        counts = [_chosen(score(_clean(logits, valid)), k, valid) for logits, score, k in calls]
        sums = torch.cat([valid.sum()[None], *counts])
        if group is not None:
            dist.all_reduce(sums, group=group)
        tokens = sums[0].clamp(min=1)
        counts = list(torch.split(sums[1:], [len(count) for count in counts]))
    aux, z = [], []
    for (logits, score, k), count in zip(calls, counts, strict=True):
        # Recomputed in backward: of all layers at once, scores in float32 would outweigh the logits several times.
        shares = checkpoint(
            _layer, logits, score, k, count, valid, tokens, use_reentrant=False, preserve_rng_state=False
        )
        aux.append(shares[0])
        z.append(shares[1])
    return Losses(torch.stack(aux).sum(), torch.stack(z).sum())


def _layer(logits: Tensor, score: Score, k: int, count: Tensor, valid: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's shares of one layer's losses, of logits [T, E]; ``count`` [E] and ``tokens`` are all ranks'."""
    clean = _clean(logits, valid)
    scores = score(clean)
    means = (scores / scores.sum(-1, keepdim=True) * valid[:, None]).sum(0) / tokens
    aux = len(count) * (count.to(means.dtype) / (k * tokens) * means).sum()
    return aux, (clean.logsumexp(-1).square() * valid).sum() / tokens


def _clean(logits: Tensor, valid: Tensor) -> Tensor:
    """Return logits [T, E] in float32 or wider, with zeros for padding, which may hold anything, NaN too."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~valid[:, None], 0)


def _chosen(scores: Tensor, k: int, valid: Tensor) -> Tensor:
    """Return how many valid tokens have each expert among their k best: [E], of scores [T, E]."""
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k, -1).indices, True)
    return (chosen & valid[:, None]).sum(0)


def valid_tokens(given: Mapping[str, Any], batch: MicroBatch | None = None) -> Tensor:
    """Return which tokens of a micro-batch are no padding: [B, S], or [B, S / n] of this rank's part.

    What fills up packed rows is padding as well (:mod:`torchturbo.objectives.documents`).
    """
    return _own(layout_of(given).real, batch)


def _own(valid: Tensor, batch: MicroBatch | None) -> Tensor:
    return valid if batch is None else part(valid, batch, 0)


class RouterLosses:
    """The router losses of one model.

    Parameters
    ----------
    model
        The module that is called.
    base
        The Transformers model; another one where PEFT wraps it.
    routers
        Those that count.
    real
        Returns which tokens of the micro-batch under way are no padding [B, S], where its mask does not tell; or None.

    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        routers: Sequence[Router],
        real: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self.layers, self._real = len(routers), real
        self._taken: list[Taken] = []
        self._losses: Losses | None = None
        self._taps = Taps(model, base)
        self._handles: list[Handle] = [
            model.register_forward_hook(_Forget(self), always_call=True),
            *(router.module.register_forward_hook(_Read(self, router)) for router in routers),
        ]
        if OWN in inspect.signature(base.forward).parameters:
            self._handles.append(model.register_forward_pre_hook(_WithoutOwn(), with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks out of the model."""
        remove_all(self._handles)
        self._taps.remove()
        self.forget()

    def install(self, normaliser: Normaliser, aux: float, z: float) -> None:
        """Add the losses to what a normaliser adds up, each with its coefficient; 0 leaves one out."""
        for at, (name, coefficient) in enumerate(((AUX, aux), (Z, z))):
            if coefficient > 0:
                # The metric is the mean over layers, and the loss the sum.
                value = partial(self._mean, at)
                normaliser.terms.append(Term(name, value, coefficient=coefficient * self.layers, pooled=True))

    def read(self, router: Router, output: Any) -> Any:
        """Keep the logits of a router's call; in recomputation, return its output with their gradient let in."""
        held = remember(Held)  # in both passes, whatever comes of it: they must note alike
        if recomputing():
            return None if held.leaf is None else with_gradient(output, router.output, held.leaf.grad)
        if self._taps.open:
            logits = logits_of(output, router.output)
            if not torch.is_grad_enabled():
                logits = held.leaf = logits.detach().requires_grad_()
            self._taken.append(Taken(router, logits))
        return None

    def forget(self) -> None:
        """Let go of the last forward's logits."""
        self._taken, self._losses = [], None

    def _mean(self, at: int, outputs: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return this rank's share of one loss, as a mean over layers; None where a forward is not differentiated."""
        if self._losses is None and self._taps.batch is not None:
            self._losses = self._compute(self._taps.batch, batch.get(SHARED))
        return None if self._losses is None else self._losses[at] / self.layers

    def _compute(self, given: Mapping[str, Any], batch: MicroBatch | None) -> Losses:
        if not self._taken:
            raise RuntimeError(
                f"router losses: none of the model's {self.layers} routers was called in a forward: something else"
                " chooses experts in their place"
            )
        real = self._real()
        valid = (valid_tokens(given, batch) if real is None else _own(real, batch)).flatten()
        calls = []
        for router, logits in self._taken:
            rows = logits.reshape(-1, logits.shape[-1])
            if len(rows) != len(valid):
                raise RuntimeError(
                    f"router losses: {router.name} was called with {len(rows)} tokens, and the micro-batch has"
                    f" {len(valid)}: which of them are padding is not known"
                )
            calls.append((rows, router.score, router.top_k))
        return router_losses(calls, valid, None if batch is None else batch.group)


class _LetIn(torch.autograd.Function):
    """Hands a tensor on, and adds a gradient to that of logits which go the same way."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_outputs[0], ctx.gradient, None


def _let_in(carrier: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    result: Tensor = _LetIn.apply(carrier, logits, gradient)  # type: ignore[no-untyped-call]
    return result


def with_gradient(output: Any, at: int, gradient: Tensor | None) -> Any:
    """Return a router's output with a gradient [..., E] let in where its logits were computed; None without any.

    It comes with that of what the layer goes on with: the weights of the chosen experts, or the logits themselves.
    """
    if gradient is None:
        return None
    logits = logits_of(output, at)
    if isinstance(output, Tensor):
        return _let_in(logits, logits, gradient)
    weights = next(i for i, value in enumerate(output) if i != at and value.is_floating_point())
    return (*output[:weights], _let_in(output[weights], logits, gradient), *output[weights + 1 :])


class _Read:
    """The hook on a router; in a copy or a pickle of the model it does nothing."""

    def __init__(self, losses: RouterLosses | None = None, router: Router | None = None) -> None:
        self._losses, self._router = losses, router

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self._losses is None or self._router is None else self._losses.read(self._router, output)

    def __reduce__(self) -> Any:
        return _Read, ()


class _Forget:
    """The hook after the model's forward, once the normaliser has added the terms; in a copy it does nothing."""

    def __init__(self, losses: RouterLosses | None = None) -> None:
        self._losses = losses

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._losses is not None:
            self._losses.forget()

    def __reduce__(self) -> Any:
        return _Forget, ()


class _WithoutOwn:
    """Lets a model leave its own auxiliary loss out, whatever its settings or its caller say."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get(OWN) is not None and kwargs.get("labels") is None  # for the logits alone
        return None if asked else (args, {**kwargs, OWN: False})
