"""Routing that recomputation repeats: which experts a token met in the forward pass is kept, not decided again.

Activation checkpointing runs a layer a second time in backward. A router that decides again may decide otherwise: of
tied scores, of weights that an accelerator multiplied in another order, of noise. Then the gradient is that of another
function, tensors have other shapes (https://github.com/pytorch/torchtitan/issues/1117), and under expert parallelism
ranks disagree about how many rows they exchange (https://github.com/NVIDIA-NeMo/Automodel/issues/3325).

A checkpointed call is wrapped in :class:`Replayed`. It notes the indices that ``topk``, ``max`` and ``argmax`` choose
among experts in the first pass, and gives them out in the same order in every later one; the scores at these indices
are gathered in both, so both passes save the same tensors and gradients reach the router's weights. The notes belong to
the call: forward and backward passes may follow each other in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Value = TypeVar("Value")

CHOICES: dict[Any, tuple[str, ...]] = {
    torch.topk: ("input", "k", "dim", "largest", "sorted"),
    torch.max: ("input", "dim", "keepdim"),
    torch.argmax: ("input", "dim", "keepdim"),
}
"""What chooses among scores, and the names of its arguments in order."""
CHOICES |= {getattr(Tensor, function.__name__): names for function, names in CHOICES.items()}


@dataclass
class Pass:
    """One run through a checkpointed call."""

    notes: list[Any]
    """What the call has noted in its first pass, in order."""
    again: bool
    """Whether this is a later pass, which repeats it."""
    candidates: int
    """Number of experts: a choice among more than that is something else, a sparse attention's for example."""
    outer: Pass | None
    """The pass in whose midst this one runs, where checkpointed calls are nested."""
    position: int = 0

    def remember(self, make: Callable[[], Value]) -> Value:
        """Return what ``make`` returns in the first pass, in this and in every later one."""
        if self.again:
            if self.position == len(self.notes):
                raise RuntimeError(
                    f"recomputation makes more choices than the forward pass, which made {len(self.notes)}:"
                    " the layer takes another path through its code the second time"
                )
            self.position += 1
            noted: Value = self.notes[self.position - 1]
            return noted
        value = make() if self.outer is None else self.outer.remember(make)
        self.notes.append(value)
        return value


_PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)


def remember(make: Callable[[], Value]) -> Value:
    """Return what ``make`` returns; inside a checkpointed call, what it returned in the first pass.

    The value is kept until the backward pass is over, and no one may change it in place.
    """
    current = _PASS.get()
    return make() if current is None else current.remember(make)


def recomputing() -> bool:
    """Return whether a checkpointed call is running again: what counts tokens leaves them out then."""
    current = _PASS.get()
    while current is not None:
        if current.again:
            return True
        current = current.outer
    return False


class Replayed:
    """A function that routes as it did the first time, each time it is called again."""

    def __init__(self, function: Callable[..., Any], candidates: int) -> None:
        self._function, self._candidates = function, candidates
        self._notes: list[Any] = []
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, under a mode that notes its choices or repeats them."""
        outer = _PASS.get()
        token = _PASS.set(Pass(self._notes, self._called, self._candidates, outer))
        try:
            with Choosing() if outer is None else nullcontext():
                result = self._function(*args, **kwargs)
        finally:
            _PASS.reset(token)
        self._called = True
        return result


def replayed(checkpoint: Callable[..., Any], candidates: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint one call of a layer in which tokens choose among so many experts."""
    return checkpoint(Replayed(function, candidates), *args, **kwargs)


class Choosing(TorchFunctionMode):
    """Notes and repeats the choices that are made in the current pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let every function through but those that choose."""
        kwargs = kwargs or {}
        if func not in CHOICES:  # first of all: torch.compile traces this line into what it compiles
            return func(*args, **kwargs)
        names, current = CHOICES[func], _PASS.get()
        if current is None:
            return func(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        scores, dim = given.get("input"), given.get("dim", -1 if "k" in names else None)
        if not isinstance(scores, Tensor) or not isinstance(dim, int) or scores.dim() == 0 or "out" in given:
            return func(*args, **kwargs)  # a maximum of everything, or of two tensors
        if scores.size(dim) > current.candidates:
            return func(*args, **kwargs)
        return _choose(current, func, scores, dim, {name: given[name] for name in given if name != "input"})


def _choose(current: Pass, func: Any, scores: Tensor, dim: int, settings: dict[str, Any]) -> Any:
    """Return what a function chooses among scores, or chose in the first pass, with the scores of this one."""
    small = torch.int16 if scores.size(dim) <= torch.iinfo(torch.int16).max else torch.int32
    fresh: list[Tensor] = []

    def make() -> Tensor:
        chosen = func(scores.detach(), **settings)
        fresh.append(chosen if isinstance(chosen, Tensor) else chosen.indices)
        return fresh[0].to(small)  # a copy, a quarter of the size, which no later code of the model can change

    noted = current.remember(make)
    indices = fresh[0] if fresh else noted.to(torch.int64)
    name = func.__name__
    if name == "argmax":
        return indices
    squeezed = name == "max" and not settings.get("keepdim", False)
    values = scores.gather(dim, indices.unsqueeze(dim) if squeezed else indices)
    kind = getattr(torch.return_types, name)
    return kind((values.squeeze(dim) if squeezed else values, indices))
