"""Muon on shards: one gather a matrix, uneven and empty shards, parameters without a gradient, offloaded ones."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import muon_models
import pytest
import torch
from muon_models import Case, give, gradients, optimizer, sharded, weights, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torchturbo.optim import muon
from torchturbo.optim.groups import matrices
from torchturbo.optim.muon import MuonAdamW, orthogonalised
from torchturbo.optim.newton_schulz import newton_schulz

LAYOUTS = [
    (Case("qwen3"), 14),  # two layers of seven
    (Case("qwen3_moe", expert_placements=(Shard(1), Shard(0))), 16),  # eight, and half of each of four stacks
    (Case("qwen3_moe", expert_placements=(Shard(2), Shard(0))), 16),
    (Case("qwen3_moe", expert_placements=(Shard(0), Shard(0))), 8),  # each expert lies whole on its rank
]
"""Layouts, and how many pieces there are to work on whole."""


def count(rank: int) -> list[tuple[dict[str, int], int]]:
    """Return for each layout the collectives of one step by name, and the matrices that this rank worked on."""
    found = []
    worked: list[int] = []
    for case, _ in LAYOUTS:
        plain = muon_models.model(case.kind)
        model = sharded(plain, case, 2)
        give(model, gradients(plain, 0))
        stepper = optimizer(model)
        with CommDebugMode() as seen, patch.object(muon, "newton_schulz", counting(worked)):
            stepper.step()
        found.append(({str(name): times for name, times in seen.get_comm_counts().items()}, sum(worked)))
        worked.clear()
    return found


def counting(worked: list[int]) -> Any:
    def counted(matrices: Tensor, *args: Any) -> Tensor:
        worked.append(matrices[..., 0, 0].numel())
        return newton_schulz(matrices, *args)

    return counted


def test_each_matrix_is_gathered_once_and_worked_on_once() -> None:
    """Two exchanges for as many pieces as ranks; torch.optim.Muon takes about fifteen collectives for each matrix."""
    results = run_ranks(2, count)
    for found in results:
        for (counts, _), (_, pieces) in zip(found, LAYOUTS, strict=True):
            assert all("alltoall" in name for name in counts), counts
            assert pieces == sum(counts.values())
    for at, (case, _) in enumerate(LAYOUTS):
        whole_model = sum(matrix.maps for matrix in matrices(muon_models.model(case.kind)))
        assert [whole_model // 2] * 2 == [found[at][1] for found in results]


ODD: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((7, 5), (Shard(0),)),  # 2, 2, 2 and 1 rows
    ((2, 9), (Shard(0),)),  # two ranks hold nothing
    ((5, 3), (Shard(1),)),
    ((3, 6, 4), (Shard(0),)),  # three experts on four ranks
    ((2, 5, 3), (Shard(1),)),  # fewer experts than ranks
    ((6, 2, 5), (Shard(1),)),  # more; two ranks hold nothing
    ((5, 3, 5), (Shard(2),)),
]


def odd(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return each odd parameter after two steps, beside the same in one process."""
    mesh = init_device_mesh("cpu", (4,))
    plain = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(at)))
        for at, (shape, _) in enumerate(ODD)
    ]
    apart = [
        nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, placements, src_data_rank=None))
        for parameter, (_, placements) in zip(plain, ODD, strict=True)
    ]
    steppers = [MuonAdamW([{"params": params, "use_muon": True}], lr=0.1) for params in (plain, apart)]
    for step in range(2):
        for at, (one, many) in enumerate(zip(plain, apart, strict=True)):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * step + at))
            assert isinstance(many, DTensor)
            many.grad = distribute_tensor(one.grad, mesh, many.placements, src_data_rank=None)
        for stepper in steppers:
            stepper.step()
    return [(one.detach(), whole(many)) for one, many in zip(plain, apart, strict=True)]


def test_uneven_and_empty_shards() -> None:
    """A rank that holds no row of a matrix takes part in its gather all the same."""
    for found in run_ranks(4, odd):
        for one, many in found:
            torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)


def shard_by_shard(rank: int) -> tuple[float, float]:
    """Return how far the update of a matrix is off: when shards are orthogonalised, and ours."""
    mesh = init_device_mesh("cpu", (2,))
    gradient = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    expected = orthogonalised(gradient)
    pieces = torch.cat([orthogonalised(part) for part in gradient.chunk(2)])
    weight = nn.Parameter(distribute_tensor(torch.zeros(64, 32), mesh, [Shard(0)], src_data_rank=None))
    weight.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
    MuonAdamW([{"params": [weight], "use_muon": True}], lr=1.0).step()
    return tuple(float((tensor - expected).norm() / expected.norm()) for tensor in (pieces, -whole(weight)))  # type: ignore[return-value]


def test_the_whole_matrix_is_orthogonalised_not_each_shard() -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8437: the update depended on the number of ranks."""
    for pieces, ours in run_ranks(2, shard_by_shard):
        assert pieces > 0.3
        assert ours < 1e-5


def some_without(rank: int) -> list[bool]:
    """Return for each parameter whether a step moved it, where every second one has no gradient."""
    plain = muon_models.model("qwen3_moe")
    model = sharded(plain, Case("qwen3_moe", ep=2), 2)
    before = weights(model)
    give(model, gradients(plain, 0))
    for at, parameter in enumerate(model.parameters()):
        if at % 2:
            parameter.grad = None
        if at % 4 == 2:
            parameter.requires_grad_(False)
    stepper = optimizer(model)
    stepper.step()
    after = weights(model)
    assert all(parameter.requires_grad for group in stepper.param_groups for parameter in group["params"])
    return [bool((after[name] != before[name]).any()) for name in before]


def test_what_has_no_gradient_or_is_frozen_stays() -> None:
    """Even its weight decay waits, as in AdamW."""
    for moved in run_ranks(2, some_without):
        assert [at % 4 == 0 for at in range(len(moved))] == moved


def through(rank: int) -> tuple[list[str], float]:
    """Step a parameter whose mesh says meta, and note where its matrix was sent before it was gathered."""
    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    apart = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)], src_data_rank=None))
    plain.grad = torch.ones(6, 4).tril()
    apart.grad = distribute_tensor(plain.grad, mesh, [Shard(0)], src_data_rank=None)
    sent: list[str] = []
    to = Tensor.to

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == "cuda":
            sent.append(args[0])
            return self
        return to(self, *args, **kwargs)

    mesh._device_type = "cuda"  # its groups are gloo's: what is gathered is on the CPU still
    Tensor.to = noted  # type: ignore[method-assign, assignment]
    for parameter in (plain, apart):
        MuonAdamW([{"params": [parameter], "use_muon": True}], lr=0.1).step()
    Tensor.to = to  # type: ignore[method-assign]
    mesh._device_type = "cpu"
    return sent, float((whole(apart) - plain.detach()).abs().max())


def test_offloaded_parameters_are_worked_on_by_the_accelerator() -> None:
    """Their shards come from the CPU and go back there; the mesh says where the work is done."""
    for sent, error in run_ranks(2, through):
        assert {"cuda"} == set(sent)
        assert error < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bf16_newton_schulz_on_a_gpu_is_near_fp32() -> None:
    """The noise of five iterations in bf16, on matrices of a usual size."""
    gradient = torch.randn(512, 1024, device="cuda")

    near, exact = (orthogonalised(gradient.to(dtype)).float() for dtype in (torch.bfloat16, torch.float32))

    assert float((near - exact).norm() / exact.norm()) < 0.05


def several_axes(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)], src_data_rank=None))
    with pytest.raises(ValueError) as caught:
        MuonAdamW([{"params": [weight], "use_muon": True}])
    replicated = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(1)], src_data_rank=None))
    replicated.grad = distribute_tensor(torch.eye(4), mesh, [Replicate(), Shard(1)], src_data_rank=None)
    MuonAdamW([{"params": [replicated], "use_muon": True}], lr=1.0).step()
    torch.testing.assert_close(whole(replicated), torch.ones(4, 4) - orthogonalised(torch.eye(4)))
    return str(caught.value)


def test_matrices_may_be_cut_along_one_axis_and_repeated_along_another() -> None:
    """As hybrid sharding does; what is cut along two is refused when the optimizer is made."""
    for message in run_ranks(4, several_axes):
        assert "expected matrices cut along one mesh axis, got [4, 4] (Shard(dim=0), Shard(dim=1))" == message
