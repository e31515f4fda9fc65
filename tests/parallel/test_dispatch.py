"""Token dispatch against its oracle: a loop over tokens and their choices, in one process with all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from torchturbo.parallel import dispatch

E, H, K = 8, 6, 3
BOUND = 2e-6


def tokens_of(rank: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [T, H], choices [T, K] and weights [T, K]; expert E is none, as Transformers marks it."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(count, H, generator=generator)
    choices = torch.stack([torch.randperm(E + 1, generator=generator)[:K] for _ in range(count)]) if count else None
    weights = torch.rand(count, K, generator=generator)
    empty = torch.zeros(0, K, dtype=torch.int64)
    return rows.requires_grad_(), empty if choices is None else choices, weights.requires_grad_()


def parameters() -> Tensor:
    """Return a matrix for each expert [E, H, H]."""
    return torch.randn(E, H, H, generator=torch.Generator().manual_seed(99)) / 2


def oracle(rows: Tensor, choices: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the weighted sums of tanh(W x) over the choices of each token, one after the other."""
    sums = []
    for token in range(len(rows)):
        result = torch.zeros(H)
        for choice in range(K):
            if (expert := int(choices[token, choice])) < E:
                result = result + weights[token, choice] * torch.tanh(experts[expert] @ rows[token])
        sums.append(result)
    return torch.stack(sums) if sums else rows * 1


def computed(experts: Tensor, calls: list[int]) -> dispatch.Compute:
    """Return the computation of some experts [E / n, H, H]."""

    def compute(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        calls.append(len(rows))
        assert chosen.shape == weights.shape == (len(rows), 1)
        return torch.tanh(torch.einsum("rij,rj->ri", experts[chosen[:, 0]], rows)) * weights

    return compute


def close(expected: Tensor, actual: Tensor) -> bool:
    return bool((expected - actual).norm() <= BOUND * expected.norm() + 1e-9)


def hold(rank: int, counts: list[int]) -> list[int]:
    world_size, calls = len(counts), []  # type: ignore[var-annotated]
    mine = parameters().chunk(world_size)[rank].clone().requires_grad_()
    rows, choices, weights = tokens_of(rank, counts[rank])
    found = dispatch.alltoall(computed(mine, calls), rows, choices, weights, E, dist.group.WORLD)
    (found * (rank + 1)).sum().backward()

    every = [tokens_of(other, count) for other, count in enumerate(counts)]
    experts = parameters().requires_grad_()
    expected = [oracle(*given, experts) for given in every]
    if sum(counts):
        sum(((result * (other + 1)).sum() for other, result in enumerate(expected)), torch.zeros(())).backward()
    total = experts.grad if sum(counts) else torch.zeros_like(experts)
    assert close(expected[rank], found)
    for ours, theirs in zip((rows, weights), (every[rank][0], every[rank][2]), strict=True):
        assert ours.grad is not None or not counts[rank]
        assert not counts[rank] or close(theirs.grad, ours.grad)  # type: ignore[arg-type]
    assert close(total.chunk(world_size)[rank], mine.grad)  # type: ignore[arg-type]
    return calls


@pytest.mark.parametrize("counts", [[5, 9], [0, 7], [0, 0], [3, 0, 0, 1], [11, 2, 5, 8]])
def test_rows_travel_to_their_experts_and_back(counts: list[int]) -> None:
    """Results, and the gradients of rows, weights and experts; ranks with no token at all, choices of no expert."""
    run_ranks(len(counts), hold, counts)


def test_experts_without_rows_compute_one_of_zeros() -> None:
    """Not every implementation takes none, and all that is trained has to be in the graph."""
    assert [[1], [1]] == run_ranks(2, hold, [0, 0])


def hold_graph(rank: int) -> tuple[bool, float]:
    """Let all tokens choose the experts of rank 0."""
    mine = parameters().chunk(2)[rank].clone().requires_grad_()
    rows = torch.ones(4, H, requires_grad=True)
    choices, weights = torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K)
    dispatch.alltoall(computed(mine, []), rows, choices, weights, E, dist.group.WORLD).sum().backward()
    return mine.grad is not None, float(rows.grad.norm())  # type: ignore[union-attr]


def test_a_rank_without_rows_has_gradients_of_zeros() -> None:
    """FSDP2 reduces the gradients that there are: https://github.com/NVIDIA-NeMo/Automodel/issues/3325 hung."""
    (first, norm), (second, other) = run_ranks(2, hold_graph)

    assert first
    assert second
    assert norm == other > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_once_on_a_device(tmp_path: Any) -> None:
    """Every other wait would keep the next layer's gather from being issued: https://github.com/pytorch/torchtitan/issues/1968."""
    import warnings

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows, choices, weights = (
            value.detach().cuda().requires_grad_(value.is_floating_point()) for value in tokens_of(0, 50)
        )
        mine = parameters().cuda().requires_grad_()
        for _ in range(2):  # the first time sets up the communicator
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                found = dispatch.alltoall(computed(mine, []), rows, choices, weights, E, dist.group.WORLD)
                found.sum().backward()
                torch.cuda.set_sync_debug_mode("default")
        assert 1 == len([wait for wait in waits if "synchroniz" in str(wait.message)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
