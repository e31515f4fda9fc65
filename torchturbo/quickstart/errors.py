"""What can stop a quickstart: one line, with what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

FAILED = 1
"""Exit status for what the machine refuses: no network, no space, no right to write."""


class QuickstartError(Exception):
    """A reason to stop, its remedy, and the exit status."""

    def __init__(self, message: str, remedy: str = "", *, status: int = FAILED) -> None:
        self.message, self.remedy, self.status = message, remedy, status
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after the training: the trained model stays."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        super().__init__()


def refused(folder: Path, error: OSError, remedy: str, *, status: int = FAILED) -> QuickstartError:
    """Return an operating system's refusal to write into a folder in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return QuickstartError(f"the disk of {folder} is full", f"free some space there, or {remedy}", status=status)
    return QuickstartError(f"cannot write to {folder} ({error.strerror or error})", remedy, status=status)


def readable_size(count: int) -> str:
    """Return a number of bytes as people say it: ``92.9 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
