"""Router losses token by token, and a step of a plain model with them: what the engine is held against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum(),
    "sigmoid": lambda logits: 1 / (1 + torch.exp(-logits)),
    "sqrtsoftplus": lambda logits: torch.log1p(torch.exp(logits)) ** 0.5,
}


def aux(logits: Tensor, valid: Tensor, k: int, score: str, load: list[float] | None = None) -> Tensor:
    """Return one layer's balancing loss of logits [T, E]; ``load`` holds each expert's share of the choices constant."""
    experts = logits.shape[1]
    rows = [row for row, keep in zip(logits, valid.tolist(), strict=True) if keep]
    chances = [SCORES[score](row) for row in rows]
    load = load_of(logits, valid, k, score) if load is None else load
    total = logits.new_zeros(())
    for expert in range(experts):
        mean = sum((chance[expert] / chance.sum() for chance in chances), logits.new_zeros(())) / max(1, len(rows))
        total = total + load[expert] * mean
    return experts * total


def load_of(logits: Tensor, valid: Tensor, k: int, score: str) -> list[float]:
    """Return each expert's share of all choices."""
    counts, tokens = [0] * logits.shape[1], 0
    for row, keep in zip(logits.tolist(), valid.tolist(), strict=True):
        if keep:
            tokens += 1
            for expert in sorted(range(len(row)), key=lambda at: -row[at])[:k]:  # every score rises with its logit
                counts[expert] += 1
    return [count / (k * max(1, tokens)) for count in counts]


def z(logits: Tensor, valid: Tensor) -> Tensor:
    """Return one layer's z-loss."""
    rows = [row for row, keep in zip(logits, valid.tolist(), strict=True) if keep]
    total = sum((torch.log(torch.exp(row).sum()) ** 2 for row in rows), logits.new_zeros(()))
    return total / max(1, len(rows))


def recomputed(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return a router's raw logits [T, E], made anew of what it was called with."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    name = type(router).__name__
    if name == "Gemma4TextRouter":
        own: Any = router
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + own.eps)
        hidden = hidden * scale * own.scale / math.sqrt(hidden.shape[1])
    (matrix,) = (value for value in router.parameters() if value.dim() == 2 and value.shape[1] == hidden.shape[1])
    bias = getattr(router, "bias", None)
    return functional.linear(hidden.to(matrix.dtype), matrix, bias)


class Watched:
    """A copy of a model, of which the test's own hooks take the logits of some routers."""

    def __init__(self, model: Any, names: Sequence[str], k: int, score: str) -> None:
        self.model = copy.deepcopy(model).train()
        self.k, self.score = k, score
        self.logits: list[Tensor] = []
        for name in names:
            module = self.model.get_submodule(name)
            module.register_forward_pre_hook(lambda router, args: self.logits.append(recomputed(router, args[0])))

    def losses(self, valid: Tensor, **batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the cross-entropy of one micro-batch, and the sums over layers of both router losses."""
        self.logits = []
        loss = self.model(**batch, num_items_in_batch=1).loss
        flat = valid.flatten()
        balance = sum((aux(logits, flat, self.k, self.score) for logits in self.logits), loss.new_zeros(()))
        return loss, balance, sum((z(logits, flat) for logits in self.logits), loss.new_zeros(()))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that have come together, by name."""
        return {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}


def step(watched: Watched, window: Sequence[dict[str, Tensor]], weight: float, other: float) -> Any:
    """Return what one optimizer step gives: cross-entropy over all targets, router losses as means over micro-batches.

    ``weight`` and ``other`` are the coefficients of the balancing loss and the z-loss.
    """
    import parity

    targets = max(1, sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window))
    total = 0.0
    for batch in window:
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        main, balance, size = watched.losses(valid, **batch)
        loss = main / targets + (weight * balance + other * size) / len(window)
        loss.backward()
        total += float(loss.detach())
    gradients = watched.gradients()
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in gradients.values()]))
    return parity.Step(total, float(norm), gradients)
