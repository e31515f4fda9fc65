"""Whose folder it is: one run at a time writes checkpoints into one, and a lock of the operating system says which.

Such a lock ends with its process, however that ends, so nobody has to guess whether a run is still alive.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torchturbo.errors import Problem
from torchturbo.logging import get_logger

LOCK = ".torchturbo-saving.lock"
"""File of an output folder that a run holds locked while it may save."""
PATIENCE = 10.0
"""Seconds to wait for another run to go: the data loader's workers outlive a killed one by some, and hold its lock."""
log = get_logger(__name__)


class Claims:
    """The folders that a run may write checkpoints to."""

    def __init__(self) -> None:
        self._locks: dict[Path, object] = {}

    def take(self, folder: Path, patience: float = 0.0) -> bool:
        """Claim a folder, which is made where it is missing; return False if another run has it.

        ``patience`` is how many seconds to wait for that one. Where files can't be locked, a warning says so and the
        folder counts as claimed.
        """
        from filelock import FileLock, Timeout

        if folder in self._locks:
            return True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=patience)
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            why = getattr(error, "strerror", None) or error
            log.warning_rank0("%s can't be locked, so another run there is not noticed: %s", folder / LOCK, why)
            with suppress(OSError):
                (folder / LOCK).touch()  # other ranks look for it
            return True
        self._locks[folder] = lock
        return True

    def release(self) -> None:
        """Give all of them back."""
        while self._locks:
            folder, lock = self._locks.popitem()
            with suppress(OSError):  # first, so that nobody locks a file that is about to go
                (folder / LOCK).unlink()
            lock.release()  # type: ignore[attr-defined]


def taken(folder: Path) -> Problem:
    """Return what to say of a folder that another run has."""
    return Problem(
        "output_dir", "", f"another run is writing its checkpoints to {folder}", "use another folder, or wait for it"
    )
