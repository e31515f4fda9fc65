"""Measures how long a run trains: a clock that stands still while something else is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet


class Clock:
    """Seconds of training: the time from the first start on, without what lies between pause and resume."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._started = False
        self._pauses = 0

    def start(self) -> None:
        """Start, if it has not been started; inside a pause it goes on with the end of the pause."""
        if not self._started:
            self._started = True
            _STARTED.add(self)
            self._go_on()

    def pause(self) -> None:
        """Stand still; pauses may lie in one another."""
        self._pauses += 1
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Go on after the outermost pause, if it was started."""
        self._pauses = max(0, self._pauses - 1)
        self._go_on()

    def stop(self) -> None:
        """Be a clock that was never started."""
        _STARTED.discard(self)
        self._seconds, self._since, self._started, self._pauses = 0.0, None, False, 0

    def lap(self) -> float:
        """Return the seconds since the last lap, and go on from zero."""
        now = time.perf_counter()
        seconds = self._seconds + (now - self._since if self._since is not None else 0.0)
        self._seconds = 0.0
        if self._since is not None:
            self._since = now
        return seconds

    def _go_on(self) -> None:
        if self._started and not self._pauses and self._since is None:
            self._since = time.perf_counter()


_STARTED: WeakSet[Clock] = WeakSet()


@contextmanager
def not_training() -> Iterator[None]:
    """Let every clock that was started stand still in this block: an observer writes its files there."""
    clocks = list(_STARTED)
    for clock in clocks:
        clock.pause()
    try:
        yield
    finally:
        for clock in clocks:
            clock.resume()
