"""TorchTurbo's logger: the standard library's, with rank-0 variants and a level that is set once."""

from __future__ import annotations

import os
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator

__all__ = ["LogLevel", "TurboLogger", "at_least", "get_logger", "set_log_level"]

ROOT = "torchturbo"


class LogLevel(IntEnum):
    """Log levels; the numbers are the standard library's."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class TurboLogger:
    """A named logger under ``torchturbo`` whose ``*_rank0`` methods speak on global rank 0 alone.

    The standard library's logger is behind it (``.raw``) and is set up on first use: importing
    this module costs a configuration parse nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def raw(self) -> logging.Logger:
        """Return the standard library's logger of this name."""
        import logging

        _set_up()
        return logging.getLogger(self.name)

    def debug(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at DEBUG on every rank."""
        self.raw.debug(message, *args, **kwargs)

    def info(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at INFO on every rank."""
        self.raw.info(message, *args, **kwargs)

    def warning(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at WARNING on every rank."""
        self.raw.warning(message, *args, **kwargs)

    def error(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at ERROR on every rank."""
        self.raw.error(message, *args, **kwargs)

    def debug_rank0(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at DEBUG on rank 0."""
        if _is_rank0():
            self.debug(message, *args, **kwargs)

    def info_rank0(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at INFO on rank 0."""
        if _is_rank0():
            self.info(message, *args, **kwargs)

    def warning_rank0(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at WARNING on rank 0."""
        if _is_rank0():
            self.warning(message, *args, **kwargs)

    def error_rank0(self, message: str, *args: object, **kwargs: Any) -> None:
        """Log at ERROR on rank 0."""
        if _is_rank0():
            self.error(message, *args, **kwargs)


def get_logger(name: str = ROOT) -> TurboLogger:
    """Return the logger of a module; a name outside ``torchturbo`` is put under it, so that one level rules all."""
    return TurboLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def set_log_level(level: LogLevel) -> None:
    """Set the level of every TorchTurbo logger of this process."""
    import logging

    _set_up()
    logging.getLogger(ROOT).setLevel(int(level))


@contextmanager
def at_least(level: LogLevel) -> Iterator[None]:
    """Let no line below a level through in this block; a level that is higher already stays."""
    import logging

    logger = logging.getLogger(ROOT)
    before = logger.level
    logger.setLevel(max(before, int(level)))
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_rank0() -> bool:
    # torchrun sets RANK before any process group exists, so the first lines of a launch are said once too.
    return os.environ.get("RANK", "0") in ("", "0", "-1")


def _set_up() -> None:
    """Give the root of our loggers one handler; whoever set one up before us keeps theirs."""
    import logging
    import sys

    root = logging.getLogger(ROOT)
    if root.handlers:
        return

    class Stderr(logging.StreamHandler[Any]):
        """Writes to whatever standard error is at that moment: a notebook or a test may replace it."""

        @property
        def stream(self) -> Any:
            return sys.stderr

        @stream.setter
        def stream(self, value: object) -> None:
            """Ignore the stream that the constructor sets."""

    handler = Stderr()
    handler.setFormatter(logging.Formatter("[torchturbo] %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.propagate = False
    if root.level == logging.NOTSET:
        root.setLevel(int(LogLevel.INFO))
