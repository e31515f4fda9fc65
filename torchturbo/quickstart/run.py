"""The quickstart's five steps, from an empty machine to a trained checkpoint and its score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchturbo
from torchturbo.quickstart import report, tickets
from torchturbo.quickstart.cache import cache_folder
from torchturbo.quickstart.command import LEARNING_RATE, ROWS_PER_STEP, Options, shown_path, train_arguments
from torchturbo.quickstart.console import Console
from torchturbo.quickstart.errors import Interrupted
from torchturbo.quickstart.model import SMOLLM2, Source, model_folder
from torchturbo.quickstart.output import Output
from torchturbo.quickstart.tickets import Score

if TYPE_CHECKING:
    from torchturbo.train.run import TrainResult

STEPS = 5
PLAIN_LINES = 4
"""Lines of progress where there is no terminal to draw a bar on."""


def quickstart(options: Options, console: Console, source: Source = SMOLLM2) -> None:
    """Run all steps. A run that fails or is interrupted leaves the output folder as it found it.

    Raises:
        QuickstartError: what the machine lacks, in one line.
        ConfigError: an environment variable of the user's sets TorchTurbo to something wrong.
        Interrupted: Ctrl-C when the model was trained already; it stays.
    """
    started = time.perf_counter()
    output = Output.claim(options.output_dir, source.folder_bytes)
    try:
        report.show_start(console, options, output)
        _Run(options, output, console, source).all(started)
    except KeyboardInterrupt:
        output.discard()
        if output.kept:
            raise Interrupted(output.model) from None
        raise
    except BaseException:
        output.discard()
        raise


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
        scores = tickets.score(self.rows, before), tickets.score(self.rows, after)
        with console.step(5, STEPS, "Result"):
            report.show_answers(console, self.rows, before, after)
            report.show_scores(console, *scores, losses)
            report.show_settings(console, config, self.options, self.output)
        seconds["all"] = round(time.perf_counter() - started, 1)
        self._keep_record(losses, scores, (before, after), seconds)
        report.show_next(console, self.options, self.output, model, curve, seconds["all"])

    def _check(self) -> None:
        """Read the training command before anything is downloaded: a wrong variable of the user's ends the run here."""
        self.console.progress("loading PyTorch and Transformers", 0, 1)
        from torchturbo.train.commandline import read_command

        self.output.write_inputs(self._facts())
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
        report.show_command(self.console, ["train", *arguments])
        result = train(arguments, callbacks=[_progress(self.console)], quiet=True)
        self.output.keep()
        self.console.say(f"trained in {result.seconds:.0f} s; the model is in {shown_path(self.output.model)}")
        report.show_curve(self.console, _losses(result))
        return result

    def _keep_record(
        self,
        losses: report.Losses,
        scores: tuple[Score, Score],
        answers: tuple[Sequence[str], Sequence[str]],
        seconds: dict[str, float],
    ) -> None:
        names = ("before", "after")
        self.output.write_record(
            {
                **self._facts(),
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

    def _facts(self) -> dict[str, Any]:
        return {
            "torchturbo": torchturbo.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
            "model": self.source.requirement,
            "steps": self.options.steps,
            "seed": self.options.seed,
            "learning_rate": float(LEARNING_RATE),
            "rows_per_step": ROWS_PER_STEP,
        }


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
