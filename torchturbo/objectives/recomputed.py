"""The chunked loss of any head, computed a second time in backward: four matrix products, one more than without chunks.

As a loop of torch.utils.checkpoint would; but each chunk's gradients are added to one buffer in place, where autograd
would hold three of a weight's size, and the logits' values are gone before the head is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import get_device_states, set_device_states

from torchturbo.objectives.chunk import (
    NO_SECOND_ORDER,
    autocast_format,
    chunk_loss,
    chunks_of,
    followed,
    loss_and_slope,
    rows_of,
)
from torchturbo.objectives.deferred import Operation


def recomputed_sum(
    project: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    hidden: Tensor,
    target: Tensor,
    kept: Tensor | None,
    operations: Sequence[Operation],
    size: int,
) -> Tensor:
    """Return the sum of the cross-entropies of hidden states [N, H] against targets [N], a scalar.

    ``project`` makes logits [n, V] of rows [n, H], with ``parameters`` that may want a gradient. In backward it runs at
    least once, with a row that counts for nothing where no row does, so that every parameter gets a gradient and every
    rank calls the same collectives.
    """
    apply: Callable[..., Tensor] = _Recomputed.apply
    learned = learned_operands(operations)
    return apply(project, target, kept, operations, size, len(parameters), hidden, *parameters, *learned)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        project: Callable[[Tensor], Tensor],
        target: Tensor,
        kept: Tensor | None,
        operations: Sequence[Operation],
        size: int,
        count: int,
        hidden: Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.project, ctx.operations, ctx.count = project, operations, count
        ctx.chunks, ctx.repeat = chunks_of(len(hidden), kept, size), _Repeat(hidden)
        ctx.save_for_backward(hidden, target, *learned)
        total: Tensor | None = None
        for rows in ctx.chunks:
            part, _ = chunk_loss(project(rows_of(hidden, rows)), rows_of(target, rows), operations)
            total = part if total is None else total + part
        if total is None:  # no row counts
            total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        (scale,) = slopes  # of the one output
        if torch.is_grad_enabled():  # create_graph: autograd would take these gradients for constants
            raise RuntimeError(NO_SECOND_ORDER)
        hidden, target, *learned = ctx.saved_tensors
        wanted = ctx.needs_input_grad[6:]
        places = [at for at, needs in enumerate(wanted) if needs and at]
        of_head = [at for at in places if at <= ctx.count]
        of_operations = [at for at in places if at > ctx.count]
        gradients: list[Tensor | None] = [torch.zeros_like(hidden) if wanted[0] else None, *[None] * len(learned)]
        with ctx.repeat.in_force():
            for rows in ctx.chunks or [slice(0, 1)]:
                states = rows_of(hidden, rows).detach().requires_grad_(wanted[0])
                with torch.enable_grad():
                    logits = ctx.project(states)
                operands = [learned[at - 1] for at in of_operations]
                labels = rows_of(target, rows) if ctx.chunks else None
                slope, *parts = _slopes(logits.detach(), labels, ctx.operations, operands, scale)
                edge = get_gradient_edge(logits) if logits.requires_grad else None
                del logits  # backward through the head needs its graph, not its values
                for at, part in zip(of_operations, parts, strict=True):
                    gradients[at] = _added(gradients[at], part)
                leaves = [states] * wanted[0] + [learned[at - 1] for at in of_head]
                if edge is None:
                    continue
                parts = _apart(torch.autograd.grad(edge, leaves, slope, allow_unused=True))
                del slope
                if gradients[0] is not None and (part := parts.pop(0)) is not None:
                    gradients[0][rows] = part
                for at in reversed(of_head):
                    gradients[at] = _added(gradients[at], parts.pop())
        return None, None, None, None, None, None, *gradients


class _Repeat:
    """What a second run of the head in backward needs to be like the first: random state and number format."""

    def __init__(self, hidden: Tensor) -> None:
        self.device_type = hidden.device.type
        self.format = autocast_format(self.device_type)
        self.state = torch.get_rng_state()
        self.devices, self.device_states = get_device_states(hidden)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Run this block with them; what is random around it goes on as if it had not run."""
        other = "cuda" if self.device_type == "cpu" else self.device_type  # without devices nothing of it is touched
        with (
            torch.random.fork_rng(self.devices, device_type=other),
            torch.autocast(self.device_type, dtype=self.format, enabled=self.format is not None),
        ):
            torch.set_rng_state(self.state)
            set_device_states(self.devices, self.device_states, device_type=other)
            yield


def _apart(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that can be added to in place: autograd may hand one tensor, or one number, out several times."""
    taken: set[int] = set()
    own: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and (gradient.data_ptr() in taken or 0 in gradient.stride()):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        own.append(gradient)
        taken |= set() if gradient is None else {gradient.data_ptr()}
    return own


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return a sum of gradients, in place where there is one already."""
    if part is None or total is None:
        return part if total is None else total
    return total.add_(part)


def learned_operands(operations: Sequence[Operation]) -> list[Tensor]:
    """Return the tensors in operations that want a gradient, each once."""
    used = [value for operation in operations for value in (*operation.args, *operation.kwargs.values())]
    return list({id(value): value for value in used if isinstance(value, Tensor) and value.requires_grad}.values())


def _slopes(
    logits: Tensor, target: Tensor | None, operations: Sequence[Operation], operands: Sequence[Tensor], scale: Tensor
) -> list[Tensor | None]:
    """Return the slopes of a chunk's loss times ``scale``, by logits [n, V] and by operands; zero without targets [n]."""
    seen = followed(logits, operations, True)
    slope = torch.zeros_like(seen) if target is None else loss_and_slope(seen, target, True)[1]
    assert slope is not None
    slope.mul_(scale)
    if not operations:
        return [slope.to(logits.dtype)]
    first, *others = torch.autograd.grad(seen, [logits, *operands], slope)
    return [first, *_apart(others)]
