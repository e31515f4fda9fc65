"""The loss of a draft: cross-entropy, distance to the target's distribution, and the confidence head's cross-entropy.

For slot j of block a with weight w = eval * exp(-j / gamma), all in at least float32:

* ``CE = -log p_d(y)``, y the token of the data;
* ``L1 = sum over v of |p_d(v) - p_t(v)|``, between 0 and 2, p_t the target's distribution at temperature 1;
* ``BCE`` of the confidence logit against ``c = clamp(1 - L1 / 2, 0, 1)``, the chance that the target accepts a token
  drawn from the draft, without a gradient.

``L = (a_ce sum w CE + a_l1 sum w L1 + a_conf sum w BCE) / D`` with ``D = sum w`` over all ranks and micro-batches of a
step. DeepSpec (https://github.com/deepseek-ai/DeepSpec), ``deepspec/modeling/dspark/loss.py``; its paper, equation 12.

Logits [rows, V] exist for one chunk of rows at a time, the draft's and the target's. Their gradients are computed beside
the losses, in forward, so that nothing of that size waits for backward, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.chunk import autocast_format


class Alphas(NamedTuple):
    """The weights of the three losses."""

    ce: float
    l1: float
    confidence: float


class Head(NamedTuple):
    """The target's head, without a gradient."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""


class Slots(NamedTuple):
    """What the losses of N slots are computed from."""

    hidden: Tensor
    """[N, H]: the draft's states."""
    latent: Tensor | None
    """[N, r]: of the Markov head; None without one."""
    teacher: Tensor
    """[N, H]: the target's states at the same place."""
    labels: Tensor
    """[N]: tokens of the data."""
    weights: Tensor
    """[N], w."""

    def rows(self, start: int, stop: int) -> Slots:
        """Return some of them."""
        return Slots(*(None if value is None else value[start:stop] for value in self))  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype) -> Slots:
        """Return them with states in a number format."""
        latent = None if self.latent is None else self.latent.to(dtype)
        return self._replace(hidden=self.hidden.to(dtype), latent=latent, teacher=self.teacher.to(dtype))


def logit_losses(slots: Slots, head: Head, markov: Tensor | None, alphas: Alphas, size: int) -> tuple[Tensor, Tensor]:
    """Compute the two losses that need logits, in chunks of ``size`` rows.

    Parameters
    ----------
    slots
        N slots.
    head
        The target's head; neither it nor ``slots.teacher`` gets a gradient.
    markov
        W2 [V, r] of the Markov head; None without one.
    alphas
        Weights of the losses.
    size
        Rows of a chunk.

    Returns
    -------
    tuple of Tensor
        ``a_ce sum w CE + a_l1 sum w L1``, a scalar; and c [N], without a gradient.

    """
    if not len(slots.labels):
        raise ValueError("DSpark: no slots")
    apply: Callable[..., tuple[Tensor, Tensor]] = _LogitLosses.apply
    return apply(slots.hidden, slots.latent, markov, slots, head, alphas, size, torch.is_grad_enabled())


class _LogitLosses(torch.autograd.Function):
    """Computes the gradients beside the losses, of which backward only takes a multiple."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        markov: Tensor | None,
        slots: Slots,
        head: Head,
        alphas: Alphas,
        size: int,
        recording: bool,
    ) -> tuple[Tensor, Tensor]:
        given = (hidden, latent, markov)
        wanted = [recording and need for need in ctx.needs_input_grad[:3]]
        gradients = [torch.zeros_like(one) if want else None for one, want in zip(given, wanted, strict=True)]  # type: ignore[arg-type]
        dtype = autocast_format(hidden.device.type) or head.weight.dtype
        total, accepted = None, []
        with torch.autocast(hidden.device.type, enabled=False):  # formats are handled by hand below
            head = Head(*(None if one is None else one.to(dtype) for one in head))  # type: ignore[arg-type]
            w2 = None if markov is None else markov.to(dtype)
            for start in range(0, len(slots.labels), size):
                part = slots.rows(start, start + size).to(dtype)
                value, chance, slope = _chunk(part, head, w2, alphas, any(wanted))
                if slope is not None:
                    _add(gradients, start, slope.to(dtype), part, head.weight, w2)
                del slope  # the next chunk's logits take its place
                total = value if total is None else total + value
                accepted.append(chance)
        assert total is not None
        chances = torch.cat(accepted)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(chances)
        return total, chances

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: autograd would take these gradients for constants
            raise RuntimeError("DSpark: the gradients of a draft's loss can't be differentiated")
        gradients = (None if one is None else one * slopes[0].to(one.dtype) for one in ctx.saved_tensors)
        return *gradients, None, None, None, None, None


def _chunk(
    slots: Slots, head: Head, markov: Tensor | None, alphas: Alphas, slope_wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what :func:`logit_losses` does, of one chunk, and the slope of the value by the draft's logits [n, V].

    By the logits z, ``dCE / dz = p - onehot(y)`` and ``dL1 / dz = p * (s - sum(p * s))`` with ``s = sign(p - p_t)``. Two
    tensors [n, V] in at least float32 hold all of it, one after the other.
    """
    target = _log_softmax(functional.linear(slots.teacher, head.weight, head.bias)).exp_()
    logits = functional.linear(slots.hidden, head.weight, head.bias)
    if markov is not None and slots.latent is not None:
        logits.addmm_(slots.latent, markov.t())
    logs = _log_softmax(logits)
    del logits
    column = slots.labels[:, None]
    cross_entropy = -logs.gather(1, column).squeeze(1)
    own = logs.exp_()
    apart = torch.sub(own, target, out=target)
    distance = torch.linalg.vector_norm(apart, 1, -1)
    value = (slots.weights * (alphas.ce * cross_entropy + alphas.l1 * distance)).sum()
    chances = (1 - distance / 2).clamp(0, 1)
    if not slope_wanted:
        return value, chances, None
    signed = apart.sign_().mul_(own)
    of_ce, of_l1 = ((slots.weights * alpha)[:, None].to(own.dtype) for alpha in (alphas.ce, alphas.l1))
    slope = own.mul_(of_ce - of_l1 * signed.sum(-1, keepdim=True)).add_(signed.mul_(of_l1))
    return value, chances, slope.scatter_add_(1, column, -of_ce)


def _add(
    gradients: Sequence[Tensor | None], start: int, slope: Tensor, slots: Slots, weight: Tensor, markov: Tensor | None
) -> None:
    """Add what a chunk's slope by its logits [n, V] gives to the gradients of all states [N, H], latents [N, r] and W2."""
    rows = slice(start, start + len(slope))
    for gradient, matrix in zip(gradients[:2], (weight, markov), strict=True):
        if gradient is not None and matrix is not None:
            gradient[rows] = torch.mm(slope, matrix).to(gradient.dtype)
    if (of_w2 := gradients[2]) is not None and slots.latent is not None:
        if of_w2.dtype == slope.dtype:
            of_w2.addmm_(slope.t(), slots.latent)
        else:
            of_w2 += torch.mm(slope.t(), slots.latent)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, V] of logits, in float32 or what is wider."""
    return functional.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def confidence_loss(logits: Tensor, accepted: Tensor, weights: Tensor) -> Tensor:
    """Return sum w BCE of confidence logits [N] against chances of acceptance [N], a scalar."""
    losses = functional.binary_cross_entropy_with_logits(logits, accepted.detach().to(logits.dtype), reduction="none")
    return (weights * losses).sum()
