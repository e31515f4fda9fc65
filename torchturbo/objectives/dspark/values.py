"""Single values of a draft's settings: each check says what was expected and what was found, and nothing where it fits.

The settings are a file's, and a value may be anything that JSON has.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

MOST_SLOTS = 1024
"""Longest block. A slot counts where all before it are accepted: what is far behind is never used, and costs memory."""


def whole(name: str, value: Any, least: int, most: int | None = None, reason: str = "") -> list[str]:
    """Check a whole number from ``least`` to ``most``; ``reason`` says what the upper bound is."""
    if type(value) is int and value >= least and (most is None or value <= most):
        return []
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return [f"{name}: expected a whole number {bounds}{reason and f', {reason}'}, got {reprlib.repr(value)}"]


def number(name: str, value: Any, least: float, below: float, *, above: bool = False) -> list[str]:
    """Check a number from ``least``, or only above it, to below another one."""
    fits = type(value) in (int, float) and least <= value < below and not (above and value == least)
    start = f"above {least:g}" if above else f"of at least {least:g}"
    return [] if fits else [f"{name}: expected a number {start} and below {below:g}, got {reprlib.repr(value)}"]


def flag(name: str, value: Any) -> list[str]:
    """Check a truth value."""
    return [] if isinstance(value, bool) else [f"{name}: expected true or false, got {reprlib.repr(value)}"]


def one_of(name: str, value: Any, known: Iterable[str]) -> list[str]:
    """Check a name."""
    names = list(known)
    if isinstance(value, str) and value in names:
        return []
    return [f"{name}: expected one of {', '.join(names)}, got {reprlib.repr(value)}"]


def ascending(name: str, value: Any, least: int, most: int, reason: str) -> list[str]:
    """Check a list of different whole numbers in order, at least one; ``reason`` says what the bounds are."""
    numbers = isinstance(value, list | tuple) and value and all(type(one) is int for one in value)
    if numbers and list(value) == sorted(set(value)) and value[0] >= least and value[-1] <= most:
        return []
    return [f"{name}: expected ascending numbers {reason}, got {reprlib.repr(value)}"]


def slots(name: str, value: Any, target: Any) -> list[str]:
    """Check the length of a block, which ends within the positions of a target with this configuration."""
    positions = getattr(target, "max_position_embeddings", None)
    if type(positions) is int and positions < MOST_SLOTS:
        return whole(name, value, 1, positions, "the target's max_position_embeddings")
    return whole(name, value, 1, MOST_SLOTS)
