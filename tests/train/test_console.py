"""What a run shows: a bar on a terminal, few lines elsewhere, and a curve that is honest."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchturbo.train.console import PLAIN_LINES, Progress, duration
from torchturbo.train.curve import loss_points, smoothed, write_curve


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, steps: int, *, first_rank: bool = True) -> str:
    progress = Progress(stream)
    state: Any = SimpleNamespace(global_step=0, max_steps=steps, is_world_process_zero=first_rank)
    progress.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        progress.on_step_end(None, state, None)
        progress.on_log(None, state, None, {"loss": 1 / step, "learning_rate": 1e-4})
    progress.on_log(None, state, None, {"train_runtime": 3.0, "train_loss": 1.0})
    progress.on_train_end(None, state, None)
    return stream.getvalue()


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_without_a_terminal_there_are_few_lines(steps: int) -> None:
    """The first, the last, and some between; a log file stays readable."""
    lines = run(io.StringIO(), steps).splitlines()

    assert len(lines) <= min(steps, PLAIN_LINES + 1)
    assert lines[0].startswith(f"step 1/{steps}  loss 1.0000  lr 1.00e-04")
    assert lines[-1].startswith(f"step {steps}/{steps}")


def test_on_a_terminal_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redrawn in place, with the newest figures."""
    text = run(Terminal(), 5)

    assert text.count("\n") == 1  # the end of the bar
    assert "5/5" in text
    assert "loss=0.2000, lr=1.00e-04" in text


def test_what_a_draft_is_good_for_is_in_the_line() -> None:
    """Its accepted length, and no other of its metrics but its loss."""
    progress, state = Progress(io.StringIO()), SimpleNamespace(global_step=1, max_steps=1, is_world_process_zero=True)
    progress.on_train_begin(None, state, None)
    logs = {"loss": 2.0, "dspark_loss": 0.5, "dspark_accepted_length": 1.724, "dspark_accept_rate_1": 0.4}

    progress.on_log(None, state, None, logs)

    line = str(progress.stream.getvalue())  # type: ignore[attr-defined]
    assert "loss 2.0000  dspark_loss 0.5000  dspark_accepted_length 1.72  " in line
    assert "accept_rate" not in line


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_silent(stream: io.StringIO) -> None:
    """One rank speaks for all."""
    assert run(stream, 5, first_rank=False) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (725, "12 min 5 s"), (10920, "3 h 2 min")],
)
def test_durations_are_as_people_say_them(seconds: float, text: str) -> None:
    """Two units at most."""
    assert duration(seconds) == text


def test_a_curve_says_that_it_has_further_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation beside it has none."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    said: list[str] = []
    monkeypatch.setattr(Axes, "set", lambda self, title, **others: said.append(title))
    for entry in ({"loss": 3.0, "step": 1}, {"loss": 3.0, "mtp_1_loss": 5.0, "step": 1}):
        write_curve([entry, {"eval_loss": 3.0, "train_loss": 3.0, "step": 1}], tmp_path / "curve.png")

    assert ["Training loss", "Training loss, with its further terms"] == said


HISTORY = [{"loss": 4.0 - step / 25, "step": step} for step in range(1, 41)] + [
    {"eval_loss": 3.0, "step": 40},
    {"train_loss": 3.0, "step": 40},
]


def test_points_are_what_was_logged() -> None:
    """The summary at the end is no point; evaluation is a curve of its own."""
    assert loss_points(HISTORY)[0] == (1, 3.96)
    assert len(loss_points(HISTORY)) == 40
    assert loss_points(HISTORY, "eval_loss") == [(40, 3.0)]


def test_smoothing_does_not_lag() -> None:
    """A straight line stays where it is, apart from its ends."""
    points = [(step, float(step)) for step in range(60)]

    assert smoothed(points)[3:-3] == points[3:-3]
    assert len(smoothed(points)) == 60


def test_the_picture_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    """Written whole; no history is no picture."""
    path = tmp_path / "loss_curve.png"

    assert write_curve([{"train_loss": 1.0, "step": 1}], path) is None
    assert write_curve(HISTORY, path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["loss_curve.png"]


def test_without_matplotlib_there_is_a_word_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """The run is not lost over its picture."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)

    assert write_curve(HISTORY, tmp_path / "loss_curve.png") is None
    assert "pip install matplotlib" in logged[0]


def test_throughput_is_shown_where_it_is_logged() -> None:
    """Tokens a second, and utilisation where there is one."""
    stream = io.StringIO()
    progress = Progress(stream)
    state: Any = SimpleNamespace(global_step=0, max_steps=2, is_world_process_zero=True)
    progress.on_train_begin(None, state, None)
    for state.global_step, logs in (
        (1, {"tokens_per_second": 12345.6}),
        (2, {"tokens_per_second": 9.9, "mfu": 0.4123}),
    ):
        progress.on_log(None, state, None, {"loss": 1.0, **logs})

    first, second = stream.getvalue().splitlines()
    assert "tokens/s 12,346  " in first and "mfu" not in first
    assert "tokens/s 10  mfu 41.2%  " in second


def test_what_a_loss_consists_of_is_shown() -> None:
    """The terms that objectives log stand behind the loss; an evaluation's and the whole run's do not."""
    stream = io.StringIO()
    progress = Progress(stream)
    state: Any = SimpleNamespace(global_step=1, max_steps=1, is_world_process_zero=True)
    progress.on_train_begin(None, state, None)
    logs = {"loss": 3.0, "learning_rate": 1e-4, "mtp_1_loss": 1.5, "eval_a_loss": 2.0, "train_loss": 2.0}
    progress.on_log(None, state, None, logs)

    assert stream.getvalue().startswith("step 1/1  loss 3.0000  mtp_1_loss 1.5000  lr 1.00e-04")
    assert "eval" not in stream.getvalue() and "train" not in stream.getvalue()
