"""What the configuration's dataclasses share: equality, text, and that they cannot be changed.

``@dataclass`` writes these methods out and compiles them class by class. For the twenty classes here that would be a
sixth of the start-up that every rank of a launch pays, so they inherit them instead.
"""

from __future__ import annotations

from dataclasses import Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


class Values:
    """Base of a mutable ``@dataclass(eq=False, repr=False)``: compared and shown by its fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _compared(self) == _compared(other)

    def __repr__(self) -> str:
        items = [item for item in fields(self) if item.repr]
        return f"{type(self).__qualname__}({', '.join(f'{item.name}={getattr(self, item.name)!r}' for item in items)})"


class FrozenValues(Values):
    """Base of a :func:`frozen` class: each field is set once, by the constructor."""

    def __hash__(self) -> int:
        return hash(_compared(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a dataclass of a subclass of FrozenValues, as ``@dataclass(frozen=True, kw_only=True)`` would, but sooner."""
    return dataclass(kw_only=True, eq=False, repr=False)(cls)


def _compared(values: Values) -> tuple[Any, ...]:
    return tuple(getattr(values, item.name) for item in fields(values) if item.compare)
