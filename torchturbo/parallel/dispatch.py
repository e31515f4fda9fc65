"""Token dispatch: each token's rows travel to the ranks that hold its experts, and the results travel back.

GShard's expert parallelism (https://arxiv.org/abs/2006.16668) without capacity: no token is dropped, so ranks exchange
as many rows as the router says, none included. Every rank calls the same collectives in the same order whatever its
tokens chose, in forward and in backward.

Sizes: T tokens of a rank, K choices of a token, H numbers of a row, E experts, n ranks, E / n experts of a rank, R rows
that a rank receives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchturbo.parallel import replay

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A rank's experts: rows [R, H], local expert of each row [R, 1] and weights [R, 1] to results [R, H]."""
Dispatcher = Callable[[Compute, Tensor, Tensor, Tensor, int, Any], Tensor]
"""Like :func:`alltoall`."""


class Counts(NamedTuple):
    """How many rows go where."""

    sent: list[int]
    """Rows that this rank sends to each rank."""
    received: list[int]
    """Rows that this rank receives from each."""
    per_expert: Tensor
    """The received rows by sender and local expert, [n, E / n]."""


def alltoall(
    compute: Compute, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: int, group: Any
) -> Tensor:
    """Return the weighted sums of the chosen experts' results [T, H], one all-to-all there and one back.

    Parameters
    ----------
    compute
        This rank's experts, ``r * E / n`` to ``(r + 1) * E / n`` on rank r; it is called with one row at least.
    hidden_states
        [T, H]
    top_k_index
        Experts of each token [T, K]; E and above stand for none.
    top_k_weights
        Their weights [T, K].
    experts
        E, a multiple of n.
    group
        The process group of the n ranks. Each calls this once; the host waits for the device once, to learn the counts.

    """
    choices, width = top_k_index.shape[-1], hidden_states.shape[-1]
    chosen, order = top_k_index.reshape(-1).sort(stable=True)  # [T * K], by expert and so by rank
    counts = replay.remember(lambda: exchange_counts(chosen, experts, group))
    order = order[: sum(counts.sent)]  # what goes to no expert is at the end
    rows = travel(hidden_states[order // choices], group, counts.sent, counts.received)
    results = travel(_computed(compute, rows, counts), group, counts.received, counts.sent)
    placed = results.new_zeros(top_k_index.numel(), width).index_copy(0, order, results)
    weighted = placed.view(-1, choices, width) * top_k_weights.reshape(-1, choices, 1)
    result: Tensor = weighted.sum(1).to(hidden_states.dtype)
    return result


DISPATCHERS: dict[str, Dispatcher] = {"alltoall": alltoall}
"""The values of ``moe.token_dispatcher``."""


def exchange_counts(chosen: Tensor, experts: int, group: Any) -> Counts:
    """Tell every rank how many rows it gets for each of its experts, from the sorted choices [T * K] of this one."""
    ranks = dist.get_world_size(group)
    # Not bincount, after which the host would wait for the size of the result.
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True)
    sent = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_ranks, from_ranks = torch.stack((sent.sum(1), received.sum(1))).tolist()  # the wait
    return Counts(to_ranks, from_ranks, received)


def _computed(compute: Compute, rows: Tensor, counts: Counts) -> Tensor:
    """Return the results of received rows [R, H].

    A rank that receives none computes a row of zeros and drops the result: implementations differ in whether they take
    nothing, and its experts and its rows have to be part of the graph, because every rank calls backward's collectives.
    """
    ranks, local = counts.per_expert.shape
    total = sum(counts.received)
    if total == 0:
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[-1])))
        experts = torch.zeros(1, dtype=torch.int64, device=rows.device)
    else:
        every = torch.arange(local, device=rows.device).repeat(ranks)
        experts = every.repeat_interleave(counts.per_expert.flatten(), output_size=total)
    ones = rows.new_ones(len(rows), 1)  # weighted where they came from: the weights' gradient is needed there
    return compute(rows, experts.unsqueeze(1), ones)[:total]


def travel(rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    """Exchange rows [sum(sent), H], of which the first go to rank 0, for [sum(received), H] by sender.

    Gradients go the way back. A collective, in forward and in backward.
    """
    result: Tensor = _Travel.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.way_back = group, received, sent
        return _exchanged(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.way_back), None, None, None


def _exchanged(rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[-1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
