"""What a run shows: one progress line on a terminal, a line now and then elsewhere, and the last lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback

from torchturbo.errors import Diverged
from torchturbo.train.curve import terms

PLAIN_LINES = 20
"""Lines of progress that a whole run prints where there is no terminal."""


class Progress(TrainerCallback):  # type: ignore[misc]
    """Shows the step, the loss and the learning rate of a run, on its first rank alone."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.bar: Any = None
        self.shown: dict[str, str] = {}
        self.next_line = 0
        self.started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar at the step the run starts from."""
        self.started = time.monotonic()
        self.first = state.global_step
        if state.is_world_process_zero and self.stream.isatty():
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="step",
                file=self.stream,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the newest figures."""
        logs = logs or {}
        for name, label, form in (
            ("loss", "loss", ".4f"),
            *((name, name, ".4f") for name in terms(logs)),  # what the loss consists of, beside the model's own
            ("dspark_accepted_length", "dspark_accepted_length", ".2f"),
            ("learning_rate", "lr", ".2e"),
            ("eval_loss", "eval", ".4f"),
            ("tokens_per_second", "tokens/s", ",.0f"),
            ("mfu", "mfu", ".1%"),
        ):
            if name in logs:
                self.shown[label] = format(float(logs[name]), form)
        if not state.is_world_process_zero or not self.shown:
            return
        if self.bar is not None:
            self.bar.set_postfix(self.shown)
        elif not self.stream.isatty() and ("loss" in logs or "eval_loss" in logs):
            self._plain(state, "eval_loss" in logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the finished bar where it is."""
        self.close()

    def close(self) -> None:
        """End the bar's line, also after an error."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _plain(self, state: Any, evaluated: bool) -> None:
        step, steps = state.global_step, state.max_steps
        if step < self.next_line and step < steps and not evaluated:
            return
        self.next_line = step + max(1, steps // PLAIN_LINES)
        pace = (time.monotonic() - self.started) / max(1, step - self.first)
        figures = "  ".join(f"{name} {value}" for name, value in self.shown.items())
        print(f"step {step}/{steps}  {figures}  {pace:.2f} s/step", file=self.stream, flush=True)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Stops a run, on every rank alike, at the first logged loss that is not finite."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Look at the loss, which is the mean over all ranks."""
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {state.global_step}: the run diverged; lower --learning_rate")


@contextmanager
def library_bars(shown: bool) -> Iterator[None]:
    """Show or hide the bars that Transformers draws for each file it reads or writes."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.is_progress_bar_enabled()
    (hf_logging.enable_progress_bar if shown else hf_logging.disable_progress_bar)()
    try:
        yield
    finally:
        (hf_logging.enable_progress_bar if before else hf_logging.disable_progress_bar)()


def duration(seconds: float) -> str:
    """Return a time as people say it: ``41.3 s``, ``12 min 5 s``, ``3 h 2 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
