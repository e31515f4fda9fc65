"""CAP, the confidence loss: the mean entropy of predictions on the tokens that are predicted correctly.

``L = 1/|C| sum over C of H``, with C the hidden tokens at which the likeliest token is the right one and H the entropy
-sum p log p of the prediction there. C is not differentiated; where it is empty the loss is 0. It makes the model sure
of what it knows, so that more tokens are decoded at once. LLaDA2.0's report, eq. 6, after dParallel
(https://github.com/czg1225/dParallel), at temperature 1 as in dFactory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchturbo.objectives.chunked import head_of, real_logits
from torchturbo.objectives.deferred import DeferredLogits, transformed
from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.parallel.ulysses import SHARED, MicroBatch

METRIC = "cap_loss"


def confident_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the entropies over C, and |C|: scalars, of logits [N, V] and right tokens [N].

    The sum has a graph also where C is empty; half formats are computed in float32.
    """
    logits = transformed(logits, ())
    correct = logits.detach().argmax(-1) == target
    logs = torch.log_softmax(logits, -1)
    # A token that can't come has probability 0 and log -inf, of which the product is no number.
    entropies = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
    return (entropies * correct).sum(), correct.sum()


class Cap:
    """What a model's loss function was called with in the training forward under way, as CAP's sum and count."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.found: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Let go of what was found, and of its graph with it."""
        self.found = None

    def look(self, logits: Tensor, target: Tensor) -> None:
        """Take the sum and the count of logits [B, T, V] and unshifted targets [B, T], before the loss changes them."""
        logits = logits.reshape(-1, logits.shape[-1])
        target = target.to(logits.device).reshape(-1)
        kept = target.ne(IGNORE_INDEX).nonzero().squeeze(1)
        if isinstance(logits, DeferredLogits):
            self.found = self._in_chunks(logits, target, kept)
        else:
            self.found = confident_entropy(logits.index_select(0, kept), target.index_select(0, kept))

    def _in_chunks(self, logits: DeferredLogits, target: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Do it for logits that wait for their loss: one chunk of them exists at a time, and in backward again."""
        head: Any = head_of(self.base)

        def chunk(hidden: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            return confident_entropy(transformed(head(hidden), logits.operations), right)

        total, count = None, torch.zeros((), dtype=torch.int64, device=target.device)
        with real_logits(self.base):
            for rows in torch.split(kept, head.turbo_chunking.size) if len(kept) else (kept,):
                hidden, right = logits.hidden.index_select(0, rows), target.index_select(0, rows)
                part, correct = checkpoint(chunk, hidden, right, use_reentrant=False)
                total = part if total is None else total + part
                count = count + correct
        assert total is not None  # a chunk at least, of no rows where nothing is hidden
        return total, count

    def value(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return this rank's share of a micro-batch's loss, a scalar; the shares of an SP group's ranks add up to it."""
        if self.found is None:
            return None
        total, count = self.found
        self.found = None
        shared: MicroBatch | None = batch.get(SHARED)
        if shared is not None:
            dist.all_reduce(count, group=shared.group)
        return total / count.clamp(min=1)


class Looking:
    """A model's loss function that shows CAP what it is called with; a copy or a pickle of the model has the plain one."""

    def __init__(self, cap: Cap, plain: Callable[..., Tensor]) -> None:
        self.cap, self.plain = cap, plain
        self.replaces = getattr(plain, "replaces", plain)

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of logits [B, T, V]."""
        target = kwargs.get("shift_labels")
        if target is not None and self.cap.base.training and torch.is_grad_enabled():
            self.cap.look(logits, target)
        return self.plain(logits, labels, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.plain,)


def _itself(function: Any) -> Any:
    return function
