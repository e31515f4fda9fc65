"""The norm of gradients that lie on different meshes, and clipping by it.

torch's ``clip_grad_norm_`` stacks the norms of all gradients, which fails where experts are on another mesh than the
rest (https://github.com/pytorch/pytorch/issues/180346). Here each mesh gives its own norm, reduced over that mesh, and
the norm of those norms is the one that clips all: on every rank, and on every mesh, by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float = float("inf")) -> Tensor:
    """Scale gradients so that their total 2-norm is at most ``max_norm``, and return the norm before that, a scalar.

    A collective: every rank calls it with all of its parameters. Without a gradient the norm is 0.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    norms = [_norm([parameter.grad for parameter in group if parameter.grad is not None]) for group in meshes.values()]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    if max_norm != float("inf"):
        for group in meshes.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
