"""The output folder of a run: claimed before anything is saved there, and the same one for all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchturbo.checkpoint.claims import LOCK, PATIENCE, Claims, taken
from torchturbo.checkpoint.files import remove_staging
from torchturbo.errors import ConfigError, Problem
from torchturbo.parallel.agree import together

SEEN_WITHIN = 5.0
"""Seconds that a file system between machines may take to show a file that another one made."""


def begin(claims: Claims, folder: Path, *, rank: int, saves: bool) -> None:
    """Claim a run's folder and clear what an interrupted run left there; one that is at work keeps its own. A collective.

    A run that is to save nothing gives it back at once.

    Raises
    ------
    ConfigError
        If another run has it, or ranks on other machines have another folder of that name: their shards would be
        missing in each checkpoint.

    """
    with together("taking the output folder"):
        if rank == 0:
            if claims.take(folder, PATIENCE if saves else 0.0):
                remove_staging(folder)
            elif saves:
                raise ConfigError([taken(folder)])
    if saves:
        with together("looking at the output folder"):
            _see(folder)
    elif rank == 0:
        claims.release()


def take(claims: Claims, folder: Path, staged: Path, *, rank: int) -> None:
    """Claim the folder of a checkpoint and make the one that it is written in. A collective.

    A rank that fails here must not leave the others in a barrier of Trainer's.
    """
    with together("taking the output folder"):
        if rank == 0 and not claims.take(folder, PATIENCE):
            raise ConfigError([taken(folder)])
        staged.mkdir(parents=True, exist_ok=True)


def _see(folder: Path) -> None:
    limit = time.monotonic() + SEEN_WITHIN
    while not os.path.lexists(folder / LOCK):
        if time.monotonic() > limit:
            message = f"{folder} is not the folder that the first rank saves in"
            raise ConfigError([Problem("output_dir", "", message, "use a folder that all machines share")])
        time.sleep(0.1)
