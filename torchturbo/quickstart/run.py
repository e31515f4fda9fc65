"""The quickstart's five steps, from an empty machine to a trained checkpoint and its score."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchturbo
from torchturbo.config.keys import shown
from torchturbo.generated.keys import KEYS
from torchturbo.quickstart import tickets
from torchturbo.quickstart.cache import cache_folder
from torchturbo.quickstart.console import BOLD, CYAN, DIM, GREEN, RED, Console
from torchturbo.quickstart.errors import Interrupted
from torchturbo.quickstart.model import SMOLLM2, Source, model_folder
from torchturbo.quickstart.output import CONFIG, RECORD, Output
from torchturbo.quickstart.plot import draw
from torchturbo.quickstart.tickets import Score

if TYPE_CHECKING:
    from torchturbo.train.run import TrainResult

STEPS = 5
ROWS_PER_STEP = 4
LEARNING_RATE = "2e-4"
SHOWN = (0, 1, 2, 3)
"""Held-out tickets that are shown with their answers: one of each type."""
PLAIN_LINES = 4
"""Lines of progress where there is no terminal to draw a bar on."""
LAST = 5
"""Training steps over which the final loss is averaged: four rows at a time make single values jump."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    output_dir: Path
    steps: int
    seed: int


def quickstart(options: Options, console: Console, source: Source = SMOLLM2) -> None:
    """Run all steps. A run that fails or is interrupted leaves the output folder as it found it.

    Raises:
        QuickstartError: what the machine lacks, in one line.
        ConfigError: an environment variable of the user's sets TorchTurbo to something wrong.
    """
    started = time.perf_counter()
    output = Output.claim(options.output_dir, source.folder_bytes)
    try:
        _introduce(options, output, console)
        _Run(options, output, console, source).all(started)
    except KeyboardInterrupt:
        output.discard()
        if output.kept:
            raise Interrupted(output.model) from None
        raise
    except BaseException:
        output.discard()
        raise


def _introduce(options: Options, output: Output, console: Console) -> None:
    console.line(console.style("TorchTurbo quickstart: a small model learns to sort tickets", BOLD))
    console.line()
    facts = (
        ("model", "SmolLM2-135M-Instruct (Apache-2.0), trained in fp32, all parameters"),
        ("task", 'ticket in, one line of JSON out: {"type": "billing", "about": "charged twice"}'),
        ("output", shown_path(output.folder)),
        ("cache", f"{cache_folder()} (set XDG_CACHE_HOME to move it)"),
    )
    for name, text in facts:
        first, *others = console.wrap(text, console.width - 10)
        console.line(f"  {console.style(name.ljust(8), DIM)}{first}")
        for other in others:
            console.line(" " * 10 + other)
    if output.folder != Path(os.path.abspath(options.output_dir)):
        console.paragraph(f"{shown_path(options.output_dir)} holds an earlier run and stays as it is.")


class _Run:
    """One run: what the steps hand on to each other."""

    def __init__(self, options: Options, output: Output, console: Console, source: Source) -> None:
        self.options, self.output, self.console, self.source = options, output, console, source
        self.rows = tickets.read_rows(tickets.HELD_OUT)

    def all(self, started: float) -> None:
        console = self.console
        self._check()
        with console.step(1, STEPS, "Get the model"):
            model = model_folder(cache_folder(), console, self.source)
        with console.step(2, STEPS, f"Ask it about {len(self.rows)} tickets it will not be trained on"):
            before = self._ask(model)
        with console.step(3, STEPS, self._training_title()):
            result = self._train(model)
        losses = _losses(result)
        seconds = {"training": round(result.seconds, 1)}
        config, curve = result.config, result.curve
        del result  # frees the trained weights: the next step reads them from the folder
        with console.step(4, STEPS, "Ask the trained model about the same tickets"):
            after = self._ask(self.output.model)
        with console.step(5, STEPS, "Result"):
            self._show_answers(before, after)
            scores = tickets.score(self.rows, before), tickets.score(self.rows, after)
            self._show_scores(*scores, losses)
            self._show_settings(config)
        seconds["all"] = round(time.perf_counter() - started, 1)
        self._finish(losses, scores, (before, after), seconds)
        self._say_what_next(model, curve, seconds["all"])

    def _check(self) -> None:
        """Read the training command before anything is downloaded: a wrong variable of the user's ends the run here."""
        self.console.progress("loading PyTorch and Transformers", 0, 1)
        from torchturbo.train.commandline import read_command

        self.output.write_inputs(self._record())
        read_command(train_arguments(self.options, self.output, cache_folder() / self.source.folder))
        self.console.end_bar()

    def _ask(self, model: Path) -> list[str]:
        from torchturbo.quickstart.answers import ask

        self.console.progress("generating the answers in one batch", 0, 1)
        answers = ask(model, self.rows)
        found = tickets.score(self.rows, answers)
        self.console.say(f"{found.valid} of {found.rows} answers are the JSON that was asked for")
        return answers

    def _training_title(self) -> str:
        count = len(tickets.read_rows(tickets.TRAIN))
        steps = "1 step" if self.options.steps == 1 else f"{self.options.steps} steps"
        return f"Train for {steps}, {ROWS_PER_STEP} of {count} tickets in each"

    def _train(self, model: Path) -> TrainResult:
        from torchturbo.train.run import train

        arguments = train_arguments(self.options, self.output, model)
        self.console.paragraph("The same as this command, by the same code:")
        self._show_command(arguments)
        result = train(arguments, callbacks=[_progress(self.console)], quiet=True)
        self.output.keep()
        self.console.say(f"trained in {result.seconds:.0f} s; the model is in {shown_path(self.output.model)}")
        for line in draw(_losses(result), min(self.console.width - 4, 72), 7, unicode=self.console.unicode):
            self.console.line(f"    {line}")
        return result

    def _show_command(self, arguments: Sequence[str]) -> None:
        for line in command_lines([*program(), "train", *arguments], self.console.width - 8):
            self.console.line("    " + self.console.style(line, CYAN))

    def _show_answers(self, before: Sequence[str], after: Sequence[str]) -> None:
        console = self.console
        right_mark, wrong_mark = ("✓", "✗") if console.unicode else ("+", "-")
        for index in SHOWN:
            row = self.rows[index]
            console.line(f"  {console.cut(row.ticket, console.width - 4)}")
            for name, answer in (("before", before[index]), ("after", after[index])):
                found = tickets.parse_answer(answer)
                right = found is not None and found["type"] == row.type
                mark = console.style(right_mark, GREEN) if right else console.style(wrong_mark, RED)
                console.line(
                    f"    {console.style(name.ljust(6), DIM)} {mark} {console.cut(answer, console.width - 13)}"
                )
        console.line()

    def _show_scores(self, before: Score, after: Score, losses: Sequence[tuple[int, float]]) -> None:
        first, last = losses[0][1], final_loss(losses)
        averaged = min(LAST, len(losses))
        rows = (
            (
                "held-out answers that are valid JSON",
                f"{before.valid} of {before.rows}",
                f"{after.valid} of {after.rows}",
            ),
            (
                "of those, the right type",
                f"{before.right_type} of {before.rows}",
                f"{after.right_type} of {after.rows}",
            ),
            (f"training loss (first; mean of last {averaged})", f"{first:.2f}", f"{last:.2f}"),
        )
        self.console.table(("", "before", "after"), rows)
        self.console.line()

    def _show_settings(self, config: Any) -> None:
        folder = shown_path(self.output.folder) + os.sep
        rows = []
        for path, value, origin in config.changed():
            if path == "config_path":  # the file itself: its path is in the command above
                continue
            layer = origin.layer.name.lower().replace("_", " ")
            rows.append((path, shown(value), layer, str(origin.place).removeprefix(folder)))
        shape = _shape(self.options)
        chosen_by = {"--max_steps": "quickstart --steps", "--seed": "quickstart --seed"}
        for flag, value in zip(shape[::2], shape[1::2], strict=True):
            rows.append((flag, value, "command line", chosen_by.get(flag, "quickstart")))
        self.console.table(("setting", "value", "layer", "where it stands"), rows)

    def _finish(
        self,
        losses: Sequence[tuple[int, float]],
        scores: tuple[Score, Score],
        answers: tuple[Sequence[str], Sequence[str]],
        seconds: dict[str, float],
    ) -> None:
        names = ("before", "after")
        self.output.write_record(
            {
                **self._record(),
                "finished": True,
                "seconds": seconds,
                "loss": [loss for _, loss in losses],
                "scores": {name: one._asdict() for name, one in zip(names, scores, strict=True)},
                "answers": [
                    {"ticket": row.ticket, "wanted": row.answer, "before": before, "after": after}
                    for row, before, after in zip(self.rows, *answers, strict=True)
                ],
            }
        )

    def _record(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "torchturbo": torchturbo.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
            "model": self.source.requirement,
            "steps": self.options.steps,
            "seed": self.options.seed,
            "learning_rate": float(LEARNING_RATE),
            "rows_per_step": ROWS_PER_STEP,
        }

    def _say_what_next(self, model: Path, curve: Path | None, seconds: float) -> None:
        console, output = self.console, self.output
        console.line()
        console.line(console.style(f"Done in {seconds:.0f} s.", BOLD) + f" In {shown_path(output.folder)}:")
        files = [(f"{output.model.name}/", "the trained model, for from_pretrained()")]
        files += [(f"{output.model.name}/{curve.name}", "the loss curve")] if curve else []
        files += [
            (RECORD, "every loss, answer and score"),
            (CONFIG, "TorchTurbo's settings for this run"),
            (output.train_rows.name, "the tickets it learned from"),
        ]
        console.table(("file", "what it is"), files)
        console.line()
        console.paragraph("Next: put your own lines into the tickets, or change a setting, and train again:")
        again = train_arguments(self.options, output, model, seed=self.options.seed + 1, model_dir="model-2")
        self._show_command(again)
        console.paragraph("Every setting and where it comes from:")
        flag = KEYS["config_path"].cli or ""
        self._show_command_line([*program(), "config", "show", flag, shown_path(output.config)])

    def _show_command_line(self, command: Sequence[str]) -> None:
        self.console.line("    " + self.console.style(shlex.join(command), CYAN))


def train_arguments(
    options: Options, output: Output, model: Path, *, seed: int | None = None, model_dir: str | None = None
) -> list[str]:
    """Return what follows ``torchturbo train`` in the command that this run is equal to."""
    out = output.folder / model_dir if model_dir else output.model
    return [
        KEYS["config_path"].cli or "",
        shown_path(output.config),
        *("--model_name_or_path", str(model)),
        *("--dataset", shown_path(output.train_rows)),
        *("--output_dir", shown_path(out)),
        *_shape(options if seed is None else Options(options.output_dir, options.steps, seed)),
        *("--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"),
    ]


def _shape(options: Options) -> list[str]:
    return [
        *("--max_steps", str(options.steps)),
        *("--per_device_train_batch_size", str(ROWS_PER_STEP)),
        *("--learning_rate", LEARNING_RATE),
        *("--lr_scheduler_type", "linear"),
        *("--seed", str(options.seed)),
    ]


def command_lines(command: Sequence[str], width: int) -> list[str]:
    """Return a command as lines for a POSIX shell, broken before options."""
    lines = [""]
    for index, word in enumerate(command):
        value = word if not word.startswith("--") else shlex.join(command[index : index + 2])
        if index and command[index - 1].startswith("--"):
            continue  # written with its option
        value = shlex.quote(value) if not word.startswith("--") else value
        if lines[-1] and len(lines[-1]) + 1 + len(value) > width:
            lines.append(f"  {value}")
        else:
            lines[-1] += f" {value}" if lines[-1] else value
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def program(started_as: str | None = None, executable: str | None = None) -> list[str]:
    """Return what this user types for ``torchturbo``: its path where no folder of PATH has it, or ``python -m``."""
    started_as = sys.argv[0] if started_as is None else started_as
    executable = sys.executable if executable is None else executable
    script = Path(started_as)
    if script.name == "__main__.py" and script.parent.name == "torchturbo":
        return [_typed("python", executable), "-m", "torchturbo"]
    return [_typed("torchturbo", started_as) if script.stem == "torchturbo" else "torchturbo"]


def _typed(name: str, path: str) -> str:
    found = shutil.which(name)
    return name if found and os.path.abspath(found) == os.path.abspath(path) else shown_path(Path(path))


def shown_path(path: Path) -> str:
    """Return a path relative to the working folder if it lies in there, else in full."""
    path = Path(os.path.abspath(path))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def final_loss(losses: Sequence[tuple[int, float]]) -> float:
    """Return the mean loss of the last training steps."""
    last = [loss for _, loss in losses[-LAST:]]
    return sum(last) / len(last)


def _losses(result: TrainResult) -> list[tuple[int, float]]:
    from torchturbo.train.curve import loss_points

    return loss_points(result.log_history)


def _progress(console: Console) -> Any:
    """Return a Trainer callback that moves the console's bar."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
        """Draws step and loss."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            console.progress("training", 0, state.max_steps)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if not logs or "loss" not in logs:
                return
            step, steps = state.global_step, state.max_steps
            text = f"step {step}/{steps}  loss {float(logs['loss']):.2f}"
            console.progress(text, step, steps)
            if not console.live and (step % max(1, steps // PLAIN_LINES) == 0 or step == steps):
                console.line(f"    {text}")

    return Progress()
