"""The slow reference of Muon and AdamW: one matrix at a time, in float64, as the papers write it.

Nothing here is shared with :mod:`torchturbo.optim.muon`: another form of the momentum, no batches, no shards, no fused
parameters. The tests take fused parameters apart themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return Newton-Schulz's approximation of U V^T of one matrix ``[M, K]`` = U S V^T (Jordan 2024)."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalise(matrix.T).T
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


@dataclass
class MuonMatrix:
    """One matrix and its momentum, updated as in algorithm 1 and equation 4 of arXiv 2502.16982, with Nesterov."""

    weight: Tensor
    """``[M, K]``, float64; replaced by each step."""
    momentum: float = 0.95
    buffer: Tensor | None = None

    def step(self, gradient: Tensor, lr: float, weight_decay: float) -> None:
        """Update the weight by one gradient ``[M, K]``."""
        gradient = gradient.double()
        previous = torch.zeros_like(gradient) if self.buffer is None else self.buffer
        self.buffer = self.momentum * previous + gradient
        direction = orthogonalise(gradient + self.momentum * self.buffer)
        scale = 0.2 * math.sqrt(max(self.weight.shape))
        self.weight = self.weight - lr * (scale * direction + weight_decay * self.weight)


@dataclass
class AdamWTensor:
    """One tensor and its moments, updated as in algorithm 2 of arXiv 1711.05101."""

    weight: Tensor
    """Any shape, float64; replaced by each step."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moments: list[Tensor] = field(default_factory=list)
    steps: int = 0

    def step(self, gradient: Tensor, lr: float, weight_decay: float) -> None:
        """Update the weight by one gradient of its shape."""
        gradient, (one, two) = gradient.double(), self.betas
        first, second = self.moments or (torch.zeros_like(gradient), torch.zeros_like(gradient))
        self.steps += 1
        self.moments = [one * first + (1 - one) * gradient, two * second + (1 - two) * gradient**2]
        mean, square = self.moments[0] / (1 - one**self.steps), self.moments[1] / (1 - two**self.steps)
        self.weight = self.weight - lr * (mean / (square.sqrt() + self.eps) + weight_decay * self.weight)
