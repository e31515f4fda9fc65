"""Sharding a model by FSDP2: each unit over its mesh, with gradients that are plain sums over all ranks.

FSDP2 (``torch.distributed.fsdp.fully_shard``) averages gradients unless told otherwise. Here every unit sums: the
losses are scaled by the one normaliser already (:mod:`torchturbo.objectives.normalise`), experts and the rest of a
model need no factors of their own, groups of one rank included, and no backend's premultiplied sum is used
(https://github.com/pytorch/pytorch/issues/190745 returns zeros from it).

Gradients are reduced after every micro-batch. To put that off until the last one would save communication and hold
the gradients of the whole model on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchturbo.engine.backends.fsdp2.units import Units
from torchturbo.parallel.mesh import is_offloaded

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.parallel.mesh import Meshes
    from torchturbo.runtime import Runtime


def shard(units: Units, meshes: Meshes, config: EngineConfig, runtime: Runtime, *, partly_used: bool = False) -> None:
    """Shard every unit of a model, in place; each module becomes an ``FSDPModule``.

    Parameters
    ----------
    units
        What :func:`torchturbo.engine.backends.fsdp2.units.find_units` finds in the model, on any device, meta included.
    partly_used
        Whether a micro-batch can leave parameters without a gradient on some ranks and not on others.

    """
    backend = config.backend_config
    settings: Any = {
        "mp_policy": mixed_precision(config.mixed_precision),
        "offload_policy": offload_policy(config, runtime),
    }
    expert_settings: Any = settings | {"shard_placement_fn": expert_placement(meshes)}
    experts = {id(module) for layer in units.layers for _, module in layer.experts}
    for unit in units.modules():
        is_root = unit is units.root
        fully_shard(
            unit,
            mesh=meshes.ep_fsdp if id(unit) in experts and meshes.plan.ep_size > 1 else meshes.fsdp,
            reshard_after_forward=backend.reshard_after_forward and not is_root,
            **(expert_settings if id(unit) in experts else settings),
        )
    for module in units.root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(partly_used)  # zeros where another rank has a gradient
    # fully_shard gives a module's class another name, and Transformers goes by names: Trainer shifts the labels of a
    # smoothed loss for the classes that it knows as causal language models.
    kind = type(units.root)
    kind.__name__ = kind.__name__.removeprefix("FSDP")


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of every unit; a model that is not sharded has none.

    A forward pass without a backward leaves the root's in place of the sharded ones, and an optimizer must get those.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mixed_precision(policy: str | None) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: bf16 gathers and computes in bf16, and reduces gradients in fp32."""
    if policy != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offload_policy(config: EngineConfig, runtime: Runtime) -> OffloadPolicy:
    """Return where sharded parameters, gradients and optimizer state live: host memory for ``mode: all``."""
    if not is_offloaded(config):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=runtime.device_type != "cpu")  # pinning asks for an accelerator


def expert_placement(meshes: Meshes) -> Callable[[nn.Parameter], Shard]:
    """Return which dimension of an expert parameter FSDP2 shards.

    Under expert parallelism dimension 0 is split over the ``ep`` ranks already, so the rows of each expert's matrix are
    split over ``ep_fsdp``. Otherwise whole experts are, where there are enough of them.
    """
    ep_size = meshes.plan.ep_size
    size = meshes.plan.ep_fsdp_size

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(tuple(parameter.shape), size, ep_size))

    return placement


def expert_shard_dim(shape: tuple[int, ...], size: int, ep_size: int) -> int:
    """Return the dimension of an expert parameter ``[E, ...]`` that is sharded over ``size`` ranks.

    FSDP2 pads an uneven dimension 0, and refuses any other that does not divide.
    """
    even = [dim for dim in range(1, len(shape)) if shape[dim] % size == 0]
    if ep_size > 1 or shape[0] < size:
        return even[0] if even else 0
    return 0
