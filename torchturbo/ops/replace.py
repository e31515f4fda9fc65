"""How an operator is exchanged in one model and put back: instances only, never a class or a modeling module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn


class Handle(Protocol):
    """What an installation leaves behind."""

    def remove(self) -> None:
        """Put back what was there before."""
        ...


class Attribute:
    """A value put into an object's own dictionary; removing it brings the earlier one back, or none."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._own: dict[str, Any] = vars(owner)
        self._name, self._value = name, value
        self._before = self._own.get(name, self)  # self: there was none
        self._own[name] = value

    def remove(self) -> None:
        """Put the earlier value back, unless somebody has put another one over ours since."""
        if self._own.get(self._name) is not self._value:
            return
        if self._before is self:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before


OURS: WeakSet[Any] = WeakSet()
"""Every function that stands in the place of another: a copy of a model has it without a handle."""


def is_ours(value: Any) -> bool:
    """Return whether an attribute is one of our functions, or one bound to a module."""
    return getattr(value, "__func__", value) in OURS


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Attribute:
    """Let one module compute with another function ``(self, ...)``.

    It is a bound method, so that a copy of the model is bound to its own modules and not to these.
    """
    OURS.add(function)
    return Attribute(module, "forward", MethodType(function, module))


def innermost(function: Any) -> FunctionType:
    """Return the function under its decorators."""
    function = getattr(function, "__func__", function)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    plain: FunctionType = function
    return plain


def with_globals(function: Any, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function that sees other values under some global names; its decorators stay around it.

    A decorator built with ``functools.wraps`` holds what it wraps in its closure; a copy of it gets the copy.

    Raises
    ------
    ValueError
        A decorator holds its function elsewhere.

    """
    plain: FunctionType = getattr(function, "__func__", function)
    inner = getattr(plain, "__wrapped__", None)
    if inner is None:
        return _copied(plain, {**plain.__globals__, **names}, plain.__closure__)
    cells = tuple(plain.__closure__ or ())
    if not any(cell.cell_contents is inner for cell in cells):
        raise ValueError(f"{plain.__qualname__} is wrapped by a decorator that hides it")
    changed = with_globals(inner, names)
    closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in cells)
    copy = _copied(plain, plain.__globals__, closure)
    copy.__wrapped__ = changed  # type: ignore[attr-defined]
    return copy


def _copied(function: FunctionType, names: dict[str, Any], closure: tuple[Any, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy


def remove_all(handles: Iterable[Handle]) -> None:
    """Undo installations, the last first."""
    for handle in reversed(list(handles)):
        handle.remove()
