"""From a training command line and a number of ranks to a plan, by the checks of the launch itself; nothing stops it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torchturbo.adapters import base
from torchturbo.config.commandline import CommandLine, read_command_line
from torchturbo.config.merge import merge
from torchturbo.config.sources import read_layers
from torchturbo.errors import Problem
from torchturbo.plan.layout import configuration, lay_out
from torchturbo.plan.report import Plan

MICRO_BATCH, ACCUMULATION = 8, 1
"""Transformers' own defaults, for a plan without a word about the training."""
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", *base.RANK_VARIABLES)


class Request(NamedTuple):
    """What is to be planned."""

    words: Sequence[str]
    """The command line of ``torchturbo train``, or a part of it."""
    world_size: int
    ranks_per_node: int = 8
    memory: int | None = None
    """Bytes of device memory of one rank; None asks this machine's accelerator."""


def examine(request: Request) -> Plan:
    """Work out a plan; all that is wrong is in it.

    Raises
    ------
    MissingLibrary
        If the command line names a model or options of the training, and training has a library missing.

    """
    plan = Plan(request.world_size, request.ranks_per_node, available=request.memory)
    line = read_command_line(request.words)
    with _listening(plan.warnings):
        if line.rest:
            with _outside_launch(os.environ):
                from torchturbo.plan.training import examine_training

                examine_training(line, plan)
        else:
            _examine_configuration(line, plan)
    plan.errors = list(dict.fromkeys(plan.errors))
    plan.warnings = list(dict.fromkeys(plan.warnings))
    return plan


def _examine_configuration(line: CommandLine, plan: Plan) -> None:
    """Work out what follows from TorchTurbo's own options; no library is imported for it."""
    named = line.reading.settings.get("config_path")
    merged = merge(read_layers(line.reading, named.value if named else None))
    plan.errors += base.environment_clashes()
    config = configuration(merged, plan)
    if config is not None:
        lay_out(config, MICRO_BATCH, ACCUMULATION, plan)


@contextmanager
def _outside_launch(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Forget the launcher's variables in this block: with them TrainingArguments would wait for the other ranks.

    Variables that libraries set in it go again, too.
    """
    before = dict(environ)
    for name in LAUNCHER:
        environ.pop(name, None)
    try:
        yield
    finally:
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update(before)


@contextmanager
def _listening(heard: list[Problem]) -> Iterator[None]:
    """Keep what TorchTurbo warns of in this block, instead of printing it, and let libraries be silent."""
    import logging

    logger = logging.getLogger("torchturbo")
    before = logger.handlers[:], logger.propagate, logger.level

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(Problem("", "", record.getMessage()))

    logger.handlers, logger.propagate = [Keep(logging.WARNING)], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers, logger.propagate = before[0], before[1]
        logger.setLevel(before[2])
