"""What the tests of Muon share: tiny models in one process, on several ranks, and as the reference sees them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import tiny
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from torchturbo.optim.groups import layouts, matrices, parameter_groups
from torchturbo.optim.muon import MuonAdamW
from torchturbo.optim.reference import AdamWTensor, MuonMatrix

LR, DECAY = 1e-2, 0.1


class Case(NamedTuple):
    """How a model is laid over ranks."""

    kind: str
    ep: int = 1
    expert_placements: tuple[Placement, Placement] = (Shard(1), Shard(0))
    """On the axes ``("ep_fsdp", "ep")``."""


def decays(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "norm" not in name and "bias" not in name]


def optimizer(model: nn.Module, **changes: Any) -> MuonAdamW:
    return MuonAdamW(parameter_groups(model, DECAY, decays(model)), lr=LR, layouts=layouts(model), **changes)


def is_expert(name: str) -> bool:
    return ".experts." in name


def sharded(model: nn.Module, case: Case, world_size: int) -> nn.Module:
    """Return a copy of a model whose parameters are DTensors, as the engine's shard step leaves them."""
    model = copy.deepcopy(model)
    experts = init_device_mesh("cpu", (world_size // case.ep, case.ep), mesh_dim_names=("ep_fsdp", "ep"))
    every = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        mesh, placements = (experts, case.expert_placements) if is_expert(name) else (every, (Shard(0),))
        distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(distributed))
    return model


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return real gradients of a plain model on a batch of its own for each step."""
    ids = torch.randint(3, 320, (2, 16), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def give(model: nn.Module, found: dict[str, Tensor]) -> None:
    """Set gradients, cut to the shards where a parameter has some."""
    for name, parameter in model.named_parameters():
        grad = found.get(name)
        if grad is not None and hasattr(parameter, "placements"):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


class Reference:
    """The reference on every tensor of a model; gate and up of Qwen's experts are taken apart here, by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.decays = set(decays(model))
        muon = {matrix.name for matrix in matrices(model)}
        self.tensors: dict[str, list[MuonMatrix | AdamWTensor]] = {}
        for name, parameter in model.named_parameters():
            parts = self._parts(name, parameter.detach().double())
            kind = MuonMatrix if name in muon else AdamWTensor
            self.tensors[name] = [kind(part) for part in parts]

    @staticmethod
    def _parts(name: str, tensor: Tensor) -> list[Tensor]:
        if not is_expert(name):
            return [tensor]
        if "gate_up" not in name:
            return list(tensor)
        half = tensor.shape[1] // 2
        return [part for expert in tensor for part in (expert[:half], expert[half:])]

    def step(self, found: dict[str, Tensor]) -> None:
        for name, tensors in self.tensors.items():
            decay = DECAY if name in self.decays else 0.0
            for tensor, gradient in zip(tensors, self._parts(name, found[name].double()), strict=True):
                tensor.step(gradient, LR, decay)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            name: torch.cat([tensor.weight for tensor in self.tensors[name]]).reshape(parameter.shape)
            for name, parameter in model.named_parameters()
        }


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error over all tensors."""
    assert expected.keys() == found.keys()
    return max(
        float((found[name].double() - tensor.double()).norm() / tensor.double().norm())
        for name, tensor in expected.items()
    )


def model(kind: str) -> nn.Module:
    made: nn.Module = tiny.model(kind).train()
    return made


def both(rank: int, world_size: int, case: Case, steps: int = 3) -> tuple[float, float]:
    """Take steps in one process, on shards and by the reference; return the shards' errors against both."""
    plain = model(case.kind)
    apart = sharded(plain, case, world_size)
    reference = Reference(plain)
    one, many = optimizer(plain), optimizer(apart)
    for step in range(steps):
        found = gradients(plain, step)
        reference.step(found)
        give(apart, found)
        one.step()
        many.step()
    result = weights(apart)
    return worst(result, weights(plain)), worst(result, reference.weights(plain))
