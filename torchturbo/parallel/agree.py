"""Agreement between ranks: what one rank finds wrong, every rank raises, so that none waits for it in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchturbo.errors import ConfigError, Problem, fail

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
    heard = _exchange(_problems(error, what))
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


def _problems(error: BaseException | None, what: str) -> list[Problem]:
    if error is None:
        return []
    if isinstance(error, ConfigError):
        return list(error.problems)
    return [Problem("", "", f"{what} failed: {type(error).__name__}: {error}")]


def _exchange(problems: list[Problem]) -> list[list[Problem]]:
    """Return every rank's problems, in rank order."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [problems]
    heard: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(heard, problems)
    return heard


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
