"""torch.distributed.checkpoint's files: written synced, read without running what they hold, errors in plain words."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchturbo.errors import shorten

T = TypeVar("T")


def staged(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of tensors, plain or sharded, in host memory: training may go on and change them."""
    copy: dict[str, Any] = BlockingAsyncStager().stage(tensors)
    return copy


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write tensors into a folder, each rank its shards, synced to the disk. A collective on ``group``.

    Raises
    ------
    OSError
        If a rank could not; the message names the rank, and every rank raises it.

    """
    with plain_errors():
        target = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        save(tensors, storage_writer=target, process_group=group, no_dist=group is None)


def from_first(read: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what rank 0 reads, on every rank; what goes wrong there is raised on all of them."""
    if group is None:
        return read()
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = read()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[1] is not None:
        raise box[1]
    found: T = box[0]
    return found


def read_into(tensors: dict[str, Any], folder: Path, index: Metadata, group: dist.ProcessGroup | None) -> None:
    """Fill tensors, plain or sharded, with what a checkpoint has under their names. A collective on ``group``.

    Raises
    ------
    ValueError
        If a file is not what the index says; the message names it.
    OSError
        If it can't be read.

    """
    with quiet(), plain_errors():
        load(tensors, storage_reader=_Reader(folder, index), process_group=group, no_dist=group is None)


class _Reader(FileSystemReader):
    """DCP's reader with an index that was read before, and errors that name the file."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(LoadPlan(items, plan.storage_data, plan.planner_data), planner)
            except pickle.UnpicklingError:
                raise ValueError(f"{name} holds other things than tensors, so it is not loaded") from None
            except Exception as error:  # whatever a damaged archive makes of itself
                raise ValueError(f"{name} can't be loaded: {shorten(' '.join(str(error).split()), 120)}") from None
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


@contextmanager
def quiet() -> Iterator[None]:
    """Keep DCP from saying that one process is one process."""
    with warnings.catch_warnings():
        silence()
        yield


def silence() -> None:
    """Do so for the rest of the process: what a thread says can't be caught in a block."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn DCP's exception, which no ``except Exception`` sees, into a plain one with its ranks' messages."""
    try:
        yield
    except CheckpointException as error:
        raise plain_error(error) from error


def plain_error(error: CheckpointException) -> Exception:
    """Return what the ranks had to say: one message where all agree, each with its rank otherwise."""
    said = {rank: failure[0] for rank, failure in error.failures.items()}
    kind: type[Exception] = OSError if any(isinstance(one, OSError) for one in said.values()) else ValueError
    texts = {str(one) or type(one).__name__ for one in said.values()}
    if len(texts) == 1 and len(said) > 1 or not dist.is_initialized():
        return kind(texts.pop())
    return kind("; ".join(f"{one} (rank {rank})" for rank, one in sorted(said.items())))
