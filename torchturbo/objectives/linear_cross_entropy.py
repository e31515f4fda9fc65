"""An output head and its cross-entropy in chunks of rows: the logits of one chunk exist at a time.

Two modes. *Gradient in forward* computes each chunk's gradients at once and only scales them in backward: three matrix
products a chunk, as without chunks. *Recompute* computes a chunk's logits again in backward, four products; it works
with any head, since autograd differentiates the head. The first is Liger's and VeOmni's scheme (and that of
``torch.nn.functional.linear_cross_entropy``), the second torch.utils.checkpoint's on a loop; unlike a loop of
checkpoints it adds each chunk's gradients to one buffer in place, where autograd would hold three of a weight's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states

from torchturbo.objectives.deferred import Operation, transformed

NO_SECOND_ORDER = "the gradients of a chunked loss can't be differentiated: turn loss_chunk.enabled off"


def autocast_format(device_type: str) -> torch.dtype | None:
    """Return the number format that autocast has in force for a device; None without autocast."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def kept_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the rows [M] of targets [N] that count, int64; None where all do."""
    kept = target.ne(ignore_index).nonzero().squeeze(1)
    return None if len(kept) == len(target) else kept


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
        ctx.chunks, ctx.repeat = _chunks(len(hidden), kept, size), _Repeat(hidden)
        ctx.save_for_backward(hidden, target, *learned)
        total: Tensor | None = None
        for rows in ctx.chunks:
            part, _ = _chunk_loss(project(_rows(hidden, rows)), _rows(target, rows), operations)
            total = part if total is None else total + part
        if total is None:  # no row counts
            total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
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
                states = _rows(hidden, rows).detach().requires_grad_(wanted[0])
                with torch.enable_grad():
                    logits = ctx.project(states)
                operands = [learned[at - 1] for at in of_operations]
                labels = _rows(target, rows) if ctx.chunks else None
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


def gradient_in_forward_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    kept: Tensor | None,
    operations: Sequence[Operation],
    size: int,
) -> Tensor:
    """Return the same sum for the head ``hidden @ weight.T + bias`` (weight [V, H], bias [V]).

    Its gradients are computed here where one is wanted, and can be handed out once.
    """
    apply: Callable[..., Tensor] = _GradientInForward.apply
    return apply(hidden, weight, bias, target, kept, operations, size, torch.is_grad_enabled())


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        kept: Tensor | None,
        operations: Sequence[Operation],
        size: int,
        recording: bool,
    ) -> Tensor:
        wanted = [need and recording for need in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden, weight, bias, wanted)
        dtype = autocast_format(hidden.device.type) or weight.dtype
        total: Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):  # formats are handled by hand below
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            for rows in _chunks(len(hidden), kept, size):
                states = _rows(hidden, rows).to(dtype)
                logits = functional.linear(states, matrix, offset)
                part, slope = _chunk_loss(logits, _rows(target, rows), operations, any(wanted))
                del logits
                if slope is not None:
                    gradients.add(rows, states, matrix, slope)
                del slope  # the next chunk's logits take its place
                total = part if total is None else total + part
        ctx.gradients = gradients
        if total is None:  # no row counts: the sum is 0, and so are the gradients
            total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: autograd would take these gradients for constants
            raise RuntimeError(NO_SECOND_ORDER)
        hidden, weight, bias = ctx.gradients.handed_out(scale)
        return hidden, weight, bias, None, None, None, None, None


class _Gradients:
    """The gradients of one loss: of hidden states [N, H], weight [V, H] and bias [V]; None for what needs none."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self.spent = False
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight) if wanted[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None

    def add(self, rows: slice | Tensor, states: Tensor, matrix: Tensor, slope: Tensor) -> None:
        """Add what a chunk gives: its states [n, H], the head's matrix [V, H], the loss's slope by logits [n, V]."""
        if self.hidden is not None:
            self.hidden[rows] = torch.mm(slope, matrix).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slope.dtype:
            self.weight.addmm_(slope.t(), states)
        elif self.weight is not None:
            self.weight += torch.mm(slope.t(), states)
        if self.bias is not None:
            self.bias += slope.sum(0)

    def handed_out(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return them times the slope of what was made of the loss. In place: a weight's has the size of the weight."""
        if self.spent:
            message = "the gradients of a chunked loss were computed in its forward pass and have been handed out"
            raise RuntimeError(f"{message}: run the forward pass again instead of going backward twice")
        self.spent = True
        gradients = self.hidden, self.weight, self.bias
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(scale)
        self.hidden = self.weight = self.bias = None
        return gradients


def _chunks(count: int, kept: Tensor | None, size: int) -> Sequence[slice | Tensor]:
    """Return the rows of each chunk: slices where all rows count, indices [n] where some do not."""
    if kept is not None:
        return torch.split(kept, size) if len(kept) else ()
    return [slice(start, start + size) for start in range(0, count, size)]


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def learned_operands(operations: Sequence[Operation]) -> list[Tensor]:
    """Return the tensors in operations that want a gradient, each once."""
    used = [value for operation in operations for value in (*operation.args, *operation.kwargs.values())]
    return list({id(value): value for value in used if isinstance(value, Tensor) and value.requires_grad}.values())


def _chunk_loss(
    logits: Tensor, target: Tensor, operations: Sequence[Operation], slope_wanted: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's summed cross-entropy after operations on logits [n, V], and its slope by the logits."""
    seen = _followed(logits, operations, slope_wanted)
    total, slope = _loss_and_slope(seen, target, slope_wanted)
    if slope is not None and operations:
        (slope,) = torch.autograd.grad(seen, logits, slope)
    return total, None if slope is None else slope.to(logits.dtype)


def _slopes(
    logits: Tensor, target: Tensor | None, operations: Sequence[Operation], operands: Sequence[Tensor], scale: Tensor
) -> list[Tensor | None]:
    """Return the slopes of a chunk's loss times ``scale``, by logits [n, V] and by operands; zero without targets [n]."""
    seen = _followed(logits, operations, True)
    slope = torch.zeros_like(seen) if target is None else _loss_and_slope(seen, target, True)[1]
    assert slope is not None
    slope.mul_(scale)
    if not operations:
        return [slope.to(logits.dtype)]
    first, *others = torch.autograd.grad(seen, [logits, *operands], slope)
    return [first, *_apart(others)]


def _followed(logits: Tensor, operations: Sequence[Operation], differentiable: bool) -> Tensor:
    """Return logits [n, V] after operations; ``torch.autograd.grad`` can go back to the logits given, if wanted."""
    with torch.set_grad_enabled(differentiable and bool(operations)):
        if operations:
            logits.requires_grad_(differentiable)
        return transformed(logits, operations)


def _loss_and_slope(logits: Tensor, target: Tensor, slope_wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of logits [n, V], and its slope by them, softmax - one-hot."""
    logs = functional.log_softmax(logits.detach(), -1)
    column = target.unsqueeze(1)
    total = -logs.gather(1, column).sum()
    if not slope_wanted:
        return total, None
    slope = logs.exp_()
    return total, slope.scatter_add_(1, column, slope.new_full((), -1.0).expand(column.shape))
