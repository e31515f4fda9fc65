"""Test-wide settings: few threads, no network, a clean environment of our own variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

# Set before torch is imported anywhere: several workers share few cores, and spinning threads starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no setting of the person who runs the tests reach them, nor one of an earlier test."""
    from torchturbo.engine.args import set_torchturbo_args
    from torchturbo.generated.keys import KEYS

    set_torchturbo_args(None)

    for key in KEYS.values():
        if key.env:
            monkeypatch.delenv(key.env, raising=False)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name, raising=False)
    # The handler of an earlier test writes to the stderr that pytest caught there and has closed since.
    # pytest gives a logger that does not propagate a handler of its own, and ours would be set up no more.
    logger = logging.getLogger("torchturbo")
    logger.handlers.clear()
    logger.propagate = True


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return what TorchTurbo logs during a test, message by message."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler, level = logging.getLogger("torchturbo"), Keep(), logging.getLogger("torchturbo").level
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)
