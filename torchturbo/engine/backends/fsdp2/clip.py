"""The norm of gradients that lie on different meshes, and clipping by it.

torch's ``clip_grad_norm_`` stacks the norms of all gradients, which fails where experts are on another mesh than the
rest (https://github.com/pytorch/pytorch/issues/180346). Here every rank sums the squares of what it holds, and one
all-reduce makes that the norm of everything: the same number on every rank, so that all clip by the same factor. Not
by the norm of their own group, which https://github.com/NVIDIA-NeMo/Automodel/issues/3816 is about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float = float("inf")) -> Tensor:
    """Scale gradients so that their total 2-norm is at most ``max_norm``, and return the norm before that, a scalar.

    A collective over all ranks: each calls it with all of its parameters. Without a gradient the norm is 0.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    if not meshes:
        return torch.zeros(())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    ranks = 1 if mesh is None else dist.get_world_size()
    squares = [_squares((parameter.grad for parameter in group), ranks) for group in meshes.values()]
    # Offloaded gradients lie in host memory, where the device's backend can't reduce.
    device = squares[0].device if mesh is None else torch.device(mesh.device_type)
    total = torch.stack([square.to(device) for square in squares]).sum()
    if ranks > 1:
        dist.all_reduce(total)
    total = total.sqrt()
    if max_norm != float("inf"):
        for group in meshes.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _squares(gradients: Iterable[Any], ranks: int) -> Tensor:
    """Return this rank's part of the sum of all squares; what several ranks hold is divided by their number."""
    held: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        local, copies = gradient, ranks
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        held.setdefault(copies, []).append(local)
    return torch.stack([get_total_norm(tensors).square() / copies for copies, tensors in held.items()]).sum()
