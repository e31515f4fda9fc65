"""Agreement between ranks: what one rank finds wrong, every rank raises, so that none waits for it in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from torchturbo.errors import ConfigError, Problem, fail

T = TypeVar("T")
AGREED = "_torchturbo_agreed"
"""Attribute of an exception that all ranks raise at the same place."""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block on every rank; if it fails on one, all of them raise and the message is printed once per node.

    Inside the block a problem is raised as a plain :class:`ConfigError`; printing is done here, after all ranks
    were heard. The exchange is a collective, so all ranks must enter the same blocks in the same order. A block inside
    another one agrees for both: its error is every rank's already.
    """
    error: Exception | ConfigError | None = None
    try:
        yield
    except (Exception, ConfigError) as caught:
        if AGREED in vars(caught):
            raise
        error = caught
    heard = everywhere(_problems(error, what))
    if not any(heard):
        return
    if error is not None and not isinstance(error, ConfigError):
        vars(error)[AGREED] = True
        raise error  # the rank itself has more to say: its type and traceback
    try:
        fail(_merged(heard))
    except ConfigError as agreed:
        vars(agreed)[AGREED] = True
        raise


def from_first(what: str, make: Callable[[], T]) -> T:
    """Return what a function returns on the first rank, on every rank; its error is every rank's. A collective.

    For what ranks would not see alike if each looked for itself: files that come and go, a slow shared folder.
    """
    made: list[Any] = [None]
    with together(what):
        if is_first():
            made[0] = make()
    if _are_several():
        dist.broadcast_object_list(made, src=0)
    return made[0]  # type: ignore[no-any-return]


def everywhere(value: T) -> list[T]:
    """Return what each rank has, in rank order. A collective."""
    if not _are_several():
        return [value]
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, value)
    return heard


def is_first() -> bool:
    """Return whether this is the first rank, or the only one."""
    return not _are_several() or dist.get_rank() == 0


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _problems(error: BaseException | None, what: str) -> list[Problem]:
    if error is None:
        return []
    if isinstance(error, ConfigError):
        return list(error.problems)
    return [Problem("", "", f"{what} failed: {type(error).__name__}: {error}")]


def _merged(heard: list[list[Problem]]) -> list[Problem]:
    """Return each problem once; one that not every rank has names its ranks."""
    ranks: dict[Problem, list[int]] = {}
    for rank, problems in enumerate(heard):
        for problem in problems:
            ranks.setdefault(Problem(*problem), []).append(rank)
    everyone = len(heard)
    return [
        problem if len(where) == everyone else problem._replace(message=f"{problem.message} ({_named(where)})")
        for problem, where in ranks.items()
    ]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
