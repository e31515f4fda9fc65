"""Comparison and text that the configuration's dataclasses share.

``@dataclass`` writes these methods out and compiles them class by class. For the twenty classes here that would be a
tenth of the start-up that every rank of a launch pays, so they are declared ``eq=False, repr=False`` and inherit.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Values:
    """Base of a mutable dataclass: equal to one of the same class with equal fields, and shown with them."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _compared(self) == _compared(other)

    def __repr__(self) -> str:
        values: Any = self  # always a dataclass, which the type of this base cannot say
        shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(values) if item.repr)
        return f"{type(self).__qualname__}({shown})"


class FrozenValues(Values):
    """Base of a frozen dataclass: it can be hashed too."""

    def __hash__(self) -> int:
        return hash(_compared(self))


def _compared(values: Any) -> tuple[Any, ...]:
    return tuple(getattr(values, item.name) for item in fields(values) if item.compare)
