"""The fuzzer's own process: libFuzzer, by atheris, on the oracles; its arguments are libFuzzer's."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["torchturbo.config", "torchturbo.engine.dump"]):
    import oracles

atheris.Setup(sys.argv, oracles.check)
oracles.limit_memory()
atheris.Fuzz()
