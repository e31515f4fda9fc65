"""Saving while training goes on: one checkpoint at a time, written by a thread of its own and renamed when it is whole.

The threads of the ranks talk over a process group of their own: collectives of two threads must not share one group's
order. Whether all ranks are done is asked over a second one, at the same places of the loop on every rank, so that a
failure ends all of them at the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchturbo.checkpoint.damage import native_problem
from torchturbo.checkpoint.files import file_names, publish_folder, remove, sync, sync_one
from torchturbo.checkpoint.layout import NATIVE
from torchturbo.checkpoint.native import State
from torchturbo.checkpoint.optimizer_state import write_options
from torchturbo.checkpoint.transfer import silence, write
from torchturbo.errors import ConfigError, Problem, some
from torchturbo.logging import get_logger
from torchturbo.parallel.agree import together
from torchturbo.runtime import Runtime

log = get_logger(__name__)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    staged: Path
    place: Path
    done: Future[frozenset[str]]
    """Ends with the names of the files that make it whole, on the first rank."""
    published: Callable[[], None]


class Background:
    """Writes checkpoints in the background.

    Parameters
    ----------
    world_size, rank
        Those of the run; its first rank names the finished folder.
    runtime
        That of the run's device, which the writing thread works on, too: torch opens a context on the device of any
        thread that asks something of it, and a new one's is the first, which is another rank's.

    """

    def __init__(self, world_size: int, rank: int, runtime: Runtime) -> None:
        self.runtime = runtime
        self.world_size = world_size
        self.rank = rank
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._saving: Saving | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the group over which checkpoints are written and read; None for one process. A collective."""
        groups = self._made_groups()
        return None if groups is None else groups[0]

    def _made_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        if self.world_size == 1:
            return None
        if self._groups is None:
            made: Any = (dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
            self._groups = made
        return self._groups

    def start(
        self, state: State, staged: Path, place: Path, complete: Callable[[], None], published: Callable[[], None]
    ) -> None:
        """Begin to write a state, which must be a copy. A collective.

        Parameters
        ----------
        staged
            The folder that becomes the checkpoint; what else belongs into it is in there already.
        complete
            Called in the thread of the first rank when all ranks have written.
        published
            Called on the first rank when the folder has its name.

        """
        assert self._saving is None  # the caller finishes the one before
        silence()
        group = self.group
        before = file_names(staged) if self.rank == 0 else frozenset()
        device = self.runtime.current_device()

        def work() -> frozenset[str]:
            self.runtime.use_device(device)
            write(state.tensors, staged / NATIVE, group)
            if self.rank != 0:
                return frozenset()
            if state.options is not None:
                write_options(state.options, staged / NATIVE)
            _check(staged, place, before)  # the record would take what is there for all that there was
            if problem := native_problem(staged / NATIVE, optimizer=state.options is not None):
                raise ConfigError([_gutted(place, problem)])
            complete()
            sync(staged)
            return file_names(staged)

        executor = ThreadPoolExecutor(1, "checkpoint")
        done = executor.submit(work)
        executor.shutdown(wait=False)  # the thread goes when its work is done; a process waits for it before it ends
        self._saving = Saving(staged, place, done, published)

    def poll(self) -> None:
        """Name the checkpoint that is being written if every rank is done. A collective while there is one."""
        saving = self._saving
        if saving is not None and self._everyone(saving.done.done()):
            self.finish()

    def _everyone(self, done: bool) -> bool:
        return not self.any_rank(not done)

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on one of the ranks. A collective."""
        groups = self._made_groups()
        if groups is None:
            return flag
        answer = torch.tensor(int(flag))
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=groups[1])
        return bool(answer)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name. A collective.

        Raises
        ------
        ConfigError
            On every rank, if one of them could not write.

        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            with together("saving the checkpoint"):
                _settle(saving)
        except BaseException:
            if self.rank == 0:
                remove(saving.staged)
            raise
        with together("publishing the checkpoint"):
            self._publish(saving)

    def abandon(self) -> None:
        """Finish without asking the other ranks, which an error may have taken elsewhere; what fails is left out."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if self.rank == 0 and not saving.done.done():
            log.warning("waiting until %s is written, before the run ends", saving.place.name)
        try:
            _settle(saving)
            self._publish(saving)
        except (Exception, ConfigError) as error:
            if self.rank == 0:
                remove(saving.staged)
                log.warning("%s is not saved: %s", saving.place.name, error)

    def _publish(self, saving: Saving) -> None:
        if self.rank == 0:
            _check(saving.staged, saving.place, saving.done.result())
            publish_folder(saving.staged, saving.place)
            sync_one(saving.place.parent)  # before older ones go
            saving.published()


def _settle(saving: Saving) -> None:
    try:
        saving.done.result()
    except Exception as error:
        message = f"can't be saved: {error or type(error).__name__}"
        problem = Problem(str(saving.place), "", message, "make room on its disk, and resume from the one before")
        raise ConfigError([problem]) from error


def _check(staged: Path, place: Path, expected: frozenset[str]) -> None:
    """Refuse to go on with a checkpoint that has lost files: it would stand in the way of the whole one before it."""
    if gone := sorted(expected - file_names(staged)):
        raise ConfigError([_gutted(place, f"{len(gone)} of its files are gone: {some(gone)}")])


def _gutted(place: Path, what: str) -> Problem:
    message = f"can't be saved: {what}; another process removed them, or not all ranks see the same folder"
    return Problem(str(place), "", message, "give each run an output_dir of its own, and resume from the one before")
