"""Several ranks without torchrun: start it with this very command, as LLaMA-Factory's own launcher does.

LLaMA-Factory's launcher starts a script of its own in each rank, past any engine, takes ``torchrun`` from PATH and
splits words at blanks. Its variables are read: FORCE_TORCHRUN, NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR,
MASTER_PORT.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchturbo.adapters.llama_factory.mapping import switch
from torchturbo.adapters.llama_factory.refusals import ENABLED
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.adapters.llama_factory.command import Command

log = get_logger(__name__)
ELASTIC = ("RDZV_ID", "MIN_NNODES", "MAX_NNODES", "MAX_RESTARTS")


def relaunch(command: Command, words: Sequence[str]) -> None:
    """Become a torchrun that starts this command once a device, where there are several; return elsewhere."""
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        return  # a rank already
    forced = os.environ.get("FORCE_TORCHRUN", "").lower() in ENABLED
    devices = 0 if switch(command.arguments.said, "use_cpu") else _devices()
    if devices < 2 and not forced:
        return
    line = torchrun(words, max(devices, 1), os.environ)
    if isinstance(line, Problem):
        fail([line])
    own = line[: len(line) - len(words)]  # the words may hold a token or a key, and logs are kept
    log.info_rank0("starting %s (your words)", shlex.join(own))
    sys.stdout.flush()
    os.execv(line[0], line)


def torchrun(words: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[str] | Problem:
    """Return the words of the torchrun that starts these words on every rank of this node."""
    if elastic := [name for name in ELASTIC if environ.get(name)]:
        remedy = "start torchrun yourself: torchrun ... -m torchturbo llamafactory ..."
        return Problem(elastic[0], "", "elastic launches are torchrun's own", remedy)
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        environ.get("NPROC_PER_NODE") or str(ranks),
    ]
    nodes = environ.get("NNODES") or "1"
    if nodes == "1":
        line += ["--standalone"]  # on a free port
    else:
        line += ["--nnodes", nodes, "--node_rank", environ.get("NODE_RANK") or "0"]
        line += ["--master_addr", environ.get("MASTER_ADDR") or "127.0.0.1"]
        line += ["--master_port", environ.get("MASTER_PORT") or "29500"]
    return [*line, "-m", "torchturbo", "llamafactory", *words]


def _devices() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
