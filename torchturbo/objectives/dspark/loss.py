"""The loss of a draft: cross-entropy, distance to the target's distribution, and the confidence head's cross-entropy.

For slot j of block a with weight w = eval * exp(-j / gamma), all in at least float32:

* ``CE = -log p_d(y)``, y the token of the data;
* ``L1 = sum over v of |p_d(v) - p_t(v)|``, between 0 and 2, p_t the target's distribution at temperature 1;
* ``BCE`` of the confidence logit against ``c = clamp(1 - L1 / 2, 0, 1)``, the chance that the target accepts a token
  drawn from the draft, without a gradient.

``L = (a_ce sum w CE + a_l1 sum w L1 + a_conf sum w BCE) / D`` with ``D = sum w`` over all ranks and micro-batches of a
step. DeepSpec (https://github.com/deepseek-ai/DeepSpec), ``deepspec/modeling/dspark/loss.py``; its paper, equation 12.

Logits [rows, V] exist for one chunk of rows at a time, the draft's and the target's, and computed again in backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
        ``a_ce sum w CE + a_l1 sum w L1``, a scalar; and c [N], detached.

    """
    total, accepted = None, []
    for start in range(0, len(slots.labels), size):
        part = slots.rows(start, start + size)
        if torch.is_grad_enabled():
            value, chance = checkpoint(
                chunk_losses, part, head, markov, alphas, use_reentrant=False, preserve_rng_state=False
            )
        else:
            value, chance = chunk_losses(part, head, markov, alphas)
        total = value if total is None else total + value
        accepted.append(chance)
    if total is None:
        raise ValueError("DSpark: no slots")
    return total, torch.cat(accepted)


def chunk_losses(slots: Slots, head: Head, markov: Tensor | None, alphas: Alphas) -> tuple[Tensor, Tensor]:
    """Return what :func:`logit_losses` does, of slots that make one chunk."""
    logits = functional.linear(slots.hidden, head.weight, head.bias)
    if markov is not None and slots.latent is not None:
        logits = logits + functional.linear(slots.latent, markov)
    logs = functional.log_softmax(wide(logits), -1)
    cross_entropy = -logs.gather(1, slots.labels[:, None]).squeeze(1)
    with torch.no_grad():
        target = functional.softmax(wide(functional.linear(slots.teacher, head.weight, head.bias)), -1)
    distance = (logs.exp() - target).abs().sum(-1)
    value = (slots.weights * (alphas.ce * cross_entropy + alphas.l1 * distance)).sum()
    return value, (1 - distance.detach() / 2).clamp(0, 1)


def confidence_loss(logits: Tensor, accepted: Tensor, weights: Tensor) -> Tensor:
    """Return sum w BCE of confidence logits [N] against chances of acceptance [N], a scalar."""
    losses = functional.binary_cross_entropy_with_logits(logits, accepted.detach().to(logits.dtype), reduction="none")
    return (weights * losses).sum()


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is where it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
