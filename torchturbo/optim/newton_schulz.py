"""Orthogonalising a matrix by Newton-Schulz iteration, batched over leading dimensions.

The quintic of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), with the coefficients and the five
steps that ``torch.optim.Muon`` has too. They do not converge to singular values of exactly 1: all end between about
0.7 and 1.2, which trains as well and takes fewer steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of X <- a X + b (X X^T) X + c (X X^T)^2 X."""
STEPS = 5
EPS = 1e-7
"""Least Frobenius norm that is divided by: a matrix of zeros stays one."""


def newton_schulz(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """Return U V^T, roughly, of each matrix U S V^T.

    Parameters
    ----------
    matrices
        ``[..., M, K]``; the iteration runs in their own dtype, the norm before it in fp32. Not changed.
    steps
        Iterations.

    Returns
    -------
    ``[..., M, K]`` in the same dtype. A matrix of zeros gives zeros.

    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller Gram matrix
    shape = x.shape
    # A product of two matrices is up to a third cheaper than a batch of one, on a CPU in bf16; the bits are the same.
    single = math.prod(shape[:-2]) == 1
    x = x.reshape(shape[-2:]) if single else x.reshape(-1, *shape[-2:])
    add_product = torch.addmm if single else torch.baddbmm
    # Where bf16 is iterated, its norm must not be rounded first: the spectral norm has to stay below 1.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / norm.clamp(min=EPS).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    return x.mT if tall else x
