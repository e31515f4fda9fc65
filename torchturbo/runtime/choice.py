"""The choice of the runtime that this process runs on."""

from __future__ import annotations

from importlib import import_module

from torchturbo.runtime.base import Runtime
from torchturbo.runtime.cpu import RUNTIME

RUNTIMES = ("torchturbo.runtime.cuda", "torchturbo.runtime.npu", "torchturbo.runtime.cpu")
"""Modules that hold a ``RUNTIME``, the first available one wins; the CPU is always there."""


def current_runtime(*, use_cpu: bool = False) -> Runtime:
    """Return the runtime of this process: an accelerator where there is one, unless the CPU is asked for."""
    if not use_cpu:
        for name in RUNTIMES:
            runtime: Runtime = import_module(name).RUNTIME
            if runtime.available():
                return runtime
    return RUNTIME
