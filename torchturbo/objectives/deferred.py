"""Logits that are not computed: hidden states, their head, and what the model did to the logits on the way to its loss.

A model's own forward goes on with them as with a tensor of shape [B, T, V]. Operations that treat every row alike
(a logit scale, soft-capping, a cast, a cut of padded vocabulary) are noted, reshaping moves to the hidden states,
and ``torch.nn.functional.cross_entropy`` at the end has the head compute the loss in chunks, with the noted operations
in each. So no list of model families and of their configuration's field names is needed, and what the model does is
what is done. Anything else is an :class:`UnknownOperation`, never a wrong number.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "contiguous", "clone"})
POINTWISE = CASTS | {
    *("mul", "multiply", "rmul", "imul", "div", "divide", "true_divide", "truediv", "itruediv", "idiv", "neg", "tanh"),
    *("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "clamp", "clip"),
}
"""Names of operations, without underscores, that give every row the same treatment."""
IN_PLACE = {"imul": "mul", "itruediv": "div", "idiv": "div", "iadd": "add", "isub": "sub"}
"""What Python's assigning operators do, as methods that leave their operand alone."""
RESHAPES = frozenset({"view", "reshape", "flatten", "unsqueeze", "squeeze"})
READS = frozenset(
    {"size", "dim", "ndimension", "numel", "__len__", "stride", "is_contiguous", "is_floating_point", "__hash__"}
)
CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
PLACEHOLDER = object()
"""Stands for the logits in the arguments of an operation."""


class UnknownOperation(RuntimeError):
    """The model did something to its logits that can't be done chunk by chunk."""


class Operation(NamedTuple):
    """A function of logits [n, V] that treats every row alike."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        """Do it to the logits [n, V] of a chunk."""
        args = (logits if argument is PLACEHOLDER else argument for argument in self.args)
        result: Tensor = self.function(*args, **self.kwargs)
        return result


def transformed(logits: Tensor, operations: Sequence[Operation]) -> Tensor:
    """Return logits [n, V] as the model's loss function sees them; half formats become float32, as it has them."""
    for operation in operations:
        logits = operation(logits)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class DeferredLogits(Tensor):
    """Stands for the logits [..., V] of hidden states [..., H].

    It is a view of one zero, so it has shape, format and device, and holds no memory.
    """

    head: Any
    hidden: Tensor
    operations: tuple[Operation, ...]
    names: list[weakref.ref[DeferredLogits]]
    """All that stand for the same memory: real logits would change under each name when they do under one."""

    @classmethod
    def of(
        cls, head: Any, hidden: Tensor, size: int, dtype: torch.dtype, operations: tuple[Operation, ...] = ()
    ) -> DeferredLogits:
        """Defer the logits of ``hidden`` [..., H] over ``size`` tokens; ``head.loss`` will compute them."""
        zero = torch.zeros((), dtype=dtype, device=hidden.device)
        deferred = zero.expand(*hidden.shape[:-1], size).as_subclass(cls)
        deferred.head, deferred.hidden, deferred.operations = head, hidden, operations
        deferred.names = [weakref.ref(deferred)]
        return deferred

    def shared_with(self, other: DeferredLogits) -> DeferredLogits:
        """Say that these are a view of others' memory, or may be; return them."""
        self.names = other.names
        self.names.append(weakref.ref(self))
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an operation, or compute the loss that it is."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", *READS):
            return _read(func, name, args, kwargs)
        holders = [value for value in args if isinstance(value, cls)]
        if len(holders) != 1 or any(isinstance(value, cls) for value in kwargs.values()):
            raise UnknownOperation(f"{_called(func)} of several logits")
        if name in RESHAPES:
            return _reshaped(holders[0], func, args, kwargs)
        if name == "__getitem__" and (cut := _vocabulary_cut(holders[0], args[1])) is not None:
            return _noted(holders[0], func, (holders[0], cut), kwargs)
        if name.strip("_") not in POINTWISE:
            raise UnknownOperation(_called(func))
        return _noted(holders[0], func, args, kwargs)


def _called(func: Any) -> str:
    return f"{getattr(func, '__name__', func)}()"


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        value = func(*args, **kwargs)
    if isinstance(value, Tensor):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        raise UnknownOperation(f"their attribute {attribute}")
    return value


def _reshaped(logits: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DeferredLogits:
    with torch._C.DisableTorchFunctionSubclass():
        shape = func(*args, **kwargs).shape
    if shape[-1:] != logits.shape[-1:]:
        raise UnknownOperation(f"{_called(func)} to {list(shape)} from {list(logits.shape)}")
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return DeferredLogits.of(logits.head, hidden, shape[-1], logits.dtype, logits.operations).shared_with(logits)


def _vocabulary_cut(logits: DeferredLogits, index: Any) -> tuple[Any, ...] | None:
    """Return the index of a cut through the vocabulary alone, ``logits[..., :n]``, for logits [n, V]; else None."""
    if not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return None
    if Ellipsis not in index and len(index) != logits.ndim:
        return None
    return (..., index[-1]) if all(part is Ellipsis or part == slice(None) for part in index[:-1]) else None


def _noted(logits: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DeferredLogits:
    """Return logits with one more operation, after trying it on no rows [0, V]: it must keep rows and rank."""
    name = getattr(func, "__name__", "")
    plain = name.strip("_")
    in_place = plain in IN_PLACE or (name.endswith("_") and not name.startswith("_"))
    if in_place:
        others = [reference() for reference in logits.names]
        if any(other is not None and other is not logits for other in others):
            raise UnknownOperation(f"{_called(func)} in place while a view of them is in use")
        # done to a chunk in place it would overwrite what autograd may need
        func = getattr(Tensor, IN_PLACE.get(plain, plain))
    operation = Operation(func, tuple(PLACEHOLDER if value is logits else value for value in args), dict(kwargs))
    try:
        result = operation(torch.zeros((0, logits.shape[-1]), dtype=logits.dtype, device=logits.device))
    except (RuntimeError, IndexError) as error:
        raise UnknownOperation(f"{_called(func)} with a tensor that differs between rows") from error
    if result.ndim != 2 or result.shape[0] != 0 or not result.dtype.is_floating_point:
        raise UnknownOperation(f"{_called(func)} with a tensor that differs between rows")
    unchanged = plain in CASTS and result.dtype == logits.dtype and result.device == logits.device
    operations = logits.operations if unchanged else (*logits.operations, operation)
    if in_place:
        logits.operations = operations
        return logits
    made = DeferredLogits.of(logits.head, logits.hidden, result.shape[-1], result.dtype, operations)
    return made.shared_with(logits) if plain == "getitem" or (unchanged and plain != "clone") else made


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """Compute what ``torch.nn.functional.cross_entropy`` would, of logits [N, V] and targets [N]."""
    given = CROSS_ENTROPY.bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    logits, target, reduction = values["input"], values["target"], values["reduction"]
    if values["weight"] is not None or values["label_smoothing"] or reduction not in ("sum", "mean"):
        raise UnknownOperation("cross_entropy() with class weights, label smoothing or without reduction")
    if not isinstance(logits, DeferredLogits) or logits.ndim != 2 or target.is_floating_point():
        raise UnknownOperation("cross_entropy() of other things than rows [N, V] and target tokens [N]")
    if target.shape != logits.shape[:1]:
        raise ValueError(f"cross_entropy() got {len(logits)} rows of logits, {target.numel()} targets")
    ignored = values["ignore_index"]
    total: Tensor = logits.head.loss(logits.hidden, target, logits.operations, ignored)
    # A mean over no target is 0, not NaN: it is the sum that a step without targets adds.
    return total if reduction == "sum" else total / target.ne(ignored).sum().clamp(min=1)
