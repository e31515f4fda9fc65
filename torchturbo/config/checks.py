"""The checks that the generated validator is made of: a value in, what would have been right out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], str | None]
"""Returns None for a value that fits, and otherwise what was expected, as in ``integer or null`` or ``at least 1``."""

INFINITY = float("inf")  # math.isfinite would be the one use of a library that is loaded from disk at every start


def boolean(*, nullable: bool = False) -> Check:
    """Accept true and false."""
    expected = _or_null("boolean", nullable)

    def check(value: Any) -> str | None:
        return None if isinstance(value, bool) or (nullable and value is None) else expected

    return check


def integer(*, minimum: int, maximum: int, nullable: bool = False) -> Check:
    """Accept integers of a range; 1.0 is the integer 1, true is none."""
    expected = _or_null("integer", nullable)

    def check(value: Any) -> str | None:
        if value is None and nullable:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return expected
        if isinstance(value, float) and not value.is_integer():
            return expected
        return _in_range(value, minimum, maximum)

    return check


def number(*, minimum: float | None = None, maximum: float | None = None, nullable: bool = False) -> Check:
    """Accept finite numbers of a range."""
    expected = _or_null("number", nullable)

    def check(value: Any) -> str | None:
        if value is None and nullable:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return expected
        if isinstance(value, float) and not -INFINITY < value < INFINITY:
            return _or_null("a finite number", nullable)
        return _in_range(value, minimum, maximum)

    return check


def string(*, nullable: bool = False) -> Check:
    """Accept any text that is not blank."""
    expected = _or_null("string", nullable)

    def check(value: Any) -> str | None:
        if value is None and nullable:
            return None
        return None if isinstance(value, str) and value.strip() else expected

    return check


def one_of(*choices: str, nullable: bool = False) -> Check:
    """Accept the listed texts."""
    words = ", ".join(choices)
    expected = words if len(choices) == 1 and not nullable else f"one of {words}{', null' if nullable else ''}"

    def check(value: Any) -> str | None:
        if value is None and nullable:
            return None
        return None if isinstance(value, str) and value in choices else expected

    return check


def strings(*, pattern: str | None = None, form: str = "") -> Check:
    """Accept a list of texts, each of a form."""

    def check(value: Any) -> str | None:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            return "list of strings"
        if pattern and not all(re.search(pattern, item) for item in value):
            return form
        return None

    return check


def _or_null(words: str, nullable: bool) -> str:
    return f"{words} or null" if nullable else words


def _in_range(value: float, minimum: float | None, maximum: float | None) -> str | None:
    if minimum is not None and value < minimum:
        return f"at least {minimum:g}"
    if maximum is not None and value > maximum:
        return f"at most {maximum:.17g}"
    return None
