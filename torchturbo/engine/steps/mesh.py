"""Step: the mesh. The process groups of a sharded run, and the same weights on each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchturbo.engine.backends.fsdp2.offload import mesh_backend
from torchturbo.parallel.mesh import Meshes

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Make the process groups, and give every rank the weights of rank 0 where each has made its model itself."""
    if not context.sharded:
        return
    if not dist.is_initialized():  # one process whose parameters are offloaded
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group(context.runtime.distributed_backend, store=store, rank=0, world_size=1)
    backend = mesh_backend(config, context.runtime)
    context.meshes = Meshes.build(context.plan, context.runtime.device_type, backend)
    if context.world_size > 1:
        _agree_on_weights(model, torch.device(context.runtime.device_type))


def _agree_on_weights(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's weights: shards of models that were initialised apart would be a model that nobody made.

    Tensors on the meta device have no values yet, and DTensors were agreed on when they were made.
    """
    for tensor in _tensors(model):
        if isinstance(tensor, DTensor) or tensor.is_meta:
            continue
        whole = tensor.to(device).contiguous()  # the device's backend can't send what lies in host memory
        dist.broadcast(whole, src=0)
        if whole is not tensor:
            tensor.copy_(whole)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.detach()
    for buffer in model.buffers():
        yield buffer.detach()
