"""What a person sees: numbered steps with times, one bar that moves, tables that fit; plain text when piped."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from torchturbo.errors import wants_colour

NARROWEST, WIDEST = 60, 100
BOLD, DIM, RED, GREEN, CYAN = "1", "2", "31", "32", "36"
ERASE = "\r\033[K"


class Console:
    """Writes to one stream, as wide as its terminal allows (60 to 100 columns; 80 where there is none)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = wants_colour(self.stream)
        self.width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns - 1))
        self.unicode = _can_encode(self.stream, "━⠿─✓…")
        self._bar: _Bar | None = None

    def style(self, text: str, *codes: str) -> str:
        """Return a text in colour, or as it is where colour is not wanted."""
        return f"\033[{';'.join(codes)}m{text}\033[0m" if self.colour and codes else text

    def line(self, text: str = "") -> None:
        """Write one line."""
        self.end_bar()
        # A path that this terminal's encoding lacks must not end a run.
        encoding = self.stream.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)

    def say(self, text: str) -> None:
        """Write what has been done within a step."""
        tick = self.style("✓" if self.unicode else "-", GREEN)
        for number, part in enumerate(self.wrap(text, self.width - 4)):
            self.line(f"  {tick if number == 0 else ' '} {part}")

    def paragraph(self, text: str, indent: str = "  ") -> None:
        """Write a text over as many lines as it needs."""
        for part in self.wrap(text, self.width - len(indent)):
            self.line(indent + part)

    def wrap(self, text: str, width: int) -> list[str]:
        """Break a text into lines between words; a word that is longer than a line stays whole, to be copied."""
        lines = [""]
        for word in text.split(" "):
            if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
                lines.append(word)
            else:
                lines[-1] += f" {word}" if lines[-1] else word
        return lines

    @contextmanager
    def step(self, number: int, total: int, title: str) -> Iterator[None]:
        """Write a step's heading before it and its time after it."""
        self.line()
        self.line(self.style(f"{number}/{total}  {title}", BOLD))
        started = time.perf_counter()
        yield
        if (seconds := time.perf_counter() - started) >= 0.05:
            self.line(self.style(f"    {seconds:.1f} s", DIM))

    def progress(self, text: str, done: int, total: int) -> None:
        """Move the bar; it disappears when ``done`` reaches ``total``. Without a terminal there is no bar."""
        if not self.live:
            return
        if done >= total:
            self.end_bar()
            return
        if self._bar is None:
            self._bar = _Bar(self)
        self._bar.show(text, done, total)

    def end_bar(self) -> None:
        """Take the bar away, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the widest columns are cut until it fits."""
        columns = list(zip(header, *rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        while sum(widths) + 2 * len(widths) > self.width:
            widths[widths.index(max(widths))] -= 1
        for number, row in enumerate((header, *rows)):
            cells = [self.cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)]
            text = "  " + "  ".join(cells).rstrip()
            self.line(self.style(text, DIM) if number == 0 else text)

    def cut(self, text: str, width: int) -> str:
        """Return a text on one line, shortened to a width."""
        text = " ".join(text.split())
        mark = "…" if self.unicode else "..."
        return text if len(text) <= width else text[: width - len(mark)].rstrip() + mark


class _Bar:
    """One line that is drawn again and again: done, total, and seconds that go on while the work is in C code."""

    SIZE = 24

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.perf_counter()
        self.text, self.done, self.total = "", 0, 1
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)
        self.thread.start()

    def show(self, text: str, done: int, total: int) -> None:
        self.text, self.done, self.total = text, done, total
        self._draw()

    def stop(self) -> None:
        self.stopped.set()
        with self.lock:
            self.console.stream.write(ERASE)
            self.console.stream.flush()

    def _tick(self) -> None:
        while not self.stopped.wait(0.5):
            self._draw()

    def _draw(self) -> None:
        seconds = f"{time.perf_counter() - self.started:.0f} s"
        picture = self._picture()
        text = self.console.cut(self.text, self.console.width - self.SIZE - len(seconds) - 8)
        with self.lock:
            if self.stopped.is_set():
                return
            self.console.stream.write(f"{ERASE}    {picture}  {text}  {seconds}")
            self.console.stream.flush()

    def _picture(self) -> str:
        """Return the bar, or something that turns where the work cannot be counted (a total of one)."""
        unicode, style = self.console.unicode, self.console.style
        if self.total <= 1:
            signs = "⠋⠙⠸⠴⠦⠇" if unicode else "|/-"
            return style(signs[int(2 * (time.perf_counter() - self.started)) % len(signs)], CYAN)
        filled = self.SIZE * self.done // self.total
        full, empty = ("━", "━" if self.console.colour else "─") if unicode else ("#", "-")
        return style(full * filled, CYAN) + style(empty * (self.SIZE - filled), DIM)


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
