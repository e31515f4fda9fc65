"""Step: deterministic algorithms, torch's strict mode plus what the device runtime needs in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchturbo.logging import get_logger

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

log = get_logger(__name__)


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Switch torch to deterministic algorithms; an operation that has none then raises instead of warning.

    The mode is the process's, so a run without the key leaves it as it finds it. The variables must be set before
    the device library's first call, hence this step is the first; a value the user chose is kept.
    """
    if not config.use_deterministic_algorithms:
        return
    for name, value in context.runtime.deterministic_environment().items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    log.info_rank0("deterministic algorithms are on, for this process until somebody turns them off")


@contextmanager
def restored_determinism() -> Iterator[None]:
    """Put torch's process-wide deterministic mode back at the end of a run inside a longer program."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
