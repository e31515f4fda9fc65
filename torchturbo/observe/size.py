"""Writes a number of bytes for people. Imports no torch."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB")


def unit(count: float) -> tuple[int, str]:
    """Return the unit of 1,024s in which a number of bytes has at most three digits before the point, and its name."""
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count /= 1024
        power += 1
    return 1024**power, UNITS[power]


def size(count: float) -> str:
    """Return a number of bytes as people say it: ``1.46 GiB``."""
    bytes_, name = unit(count)
    count /= bytes_
    return f"{count:.3g} {name}" if count < 1000 else f"{count:,.0f} {name}"
