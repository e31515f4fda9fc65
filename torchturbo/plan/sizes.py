"""Sizes of memory and counts, as people write and read them. Imports no torch."""

from __future__ import annotations

import re

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_size(text: str) -> int | None:
    """Return a number of bytes from a text such as ``80GiB``, ``80GB`` or ``80G``; None for what is no size.

    ``iB`` and the bare letter are powers of 1,024, as memory is sold; ``B`` alone is a power of 1,000.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if match is None:
        return None
    number, unit, suffix = match[1], match[2], match[3]
    base = 1000 if suffix == "b" and unit else 1024
    return int(float(number) * base ** UNITS[unit]) or None


def count(number: int) -> str:
    """Return a number of parameters as people say it: ``235 billion``."""
    for power, word in ((12, "trillion"), (9, "billion"), (6, "million")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {word}"
    return f"{number:,}"
