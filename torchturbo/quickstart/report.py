"""What the quickstart shows of a run: what it is about to do, answers and scores, settings, and what to do next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchturbo.config.keys import shown
from torchturbo.generated.keys import KEYS
from torchturbo.quickstart.cache import cache_folder
from torchturbo.quickstart.command import Options, command_lines, program, recipe, shown_path, train_arguments
from torchturbo.quickstart.console import BOLD, CYAN, DIM, GREEN, RED, Console
from torchturbo.quickstart.output import CONFIG, RECORD, Output
from torchturbo.quickstart.plot import draw
from torchturbo.quickstart.tickets import Row, Score, parse_answer

Losses = Sequence[tuple[int, float]]
"""(step, training loss) of each step."""

SHOWN = (0, 1, 2, 3)
"""Held-out tickets that are shown with their answers: one of each type."""
LAST = 5
"""Training steps over which the final loss is averaged: four rows at a time make single values jump."""


def show_start(console: Console, options: Options, output: Output) -> None:
    """Say what will happen and where."""
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


def show_command(console: Console, arguments: Sequence[str]) -> None:
    """Show a command of this program over as many lines as it needs."""
    for line in command_lines([*program(), *arguments], console.width - 8):
        console.line("    " + console.style(line, CYAN))


def show_curve(console: Console, losses: Losses) -> None:
    """Draw the loss curve."""
    for line in draw(losses, min(console.width - 4, 72), 7, unicode=console.unicode):
        console.line(f"    {line}")


def show_answers(console: Console, rows: Sequence[Row], before: Sequence[str], after: Sequence[str]) -> None:
    """Show one ticket of each type with both answers, marked as right or wrong."""
    right_mark, wrong_mark = ("✓", "✗") if console.unicode else ("+", "-")
    for index in SHOWN:
        row = rows[index]
        console.line(f"  {console.cut(row.ticket, console.width - 4)}")
        for name, answer in (("before", before[index]), ("after", after[index])):
            found = parse_answer(answer)
            right = found is not None and found["type"] == row.type
            mark = console.style(right_mark, GREEN) if right else console.style(wrong_mark, RED)
            console.line(f"    {console.style(name.ljust(6), DIM)} {mark} {console.cut(answer, console.width - 13)}")
    console.line()


def show_scores(console: Console, before: Score, after: Score, losses: Losses) -> None:
    """Show scores and loss side by side."""
    averaged = min(LAST, len(losses))
    both = (before, after)
    rows = (
        ("held-out answers that are valid JSON", *(f"{one.valid} of {one.rows}" for one in both)),
        ("of those, the right type", *(f"{one.right_type} of {one.rows}" for one in both)),
        (f"training loss (first; mean of last {averaged})", f"{losses[0][1]:.2f}", f"{final_loss(losses):.2f}"),
    )
    console.table(("", "before", "after"), rows)
    console.line()


def final_loss(losses: Losses) -> float:
    """Return the mean loss of the last training steps."""
    last = [loss for _, loss in losses[-LAST:]]
    return sum(last) / len(last)


def show_settings(console: Console, config: Any, options: Options, output: Output) -> None:
    """Show each setting that is not a default, with its layer and the place it comes from."""
    folder = shown_path(output.folder) + os.sep
    rows = []
    for path, value, origin in config.changed():
        if path == "config_path":  # the file itself: its path is in the command above
            continue
        layer = origin.layer.name.lower().replace("_", " ")
        rows.append((path, shown(value), layer, str(origin.place).removeprefix(folder)))
    chosen_by = {"--max_steps": "quickstart --steps", "--seed": "quickstart --seed"}
    for flag, value in recipe(options).items():
        rows.append((flag, value, "command line", chosen_by.get(flag, "quickstart")))
    console.table(("setting", "value", "layer", "where it stands"), rows)


def show_next(
    console: Console, options: Options, output: Output, model: Path, curve: Path | None, seconds: float
) -> None:
    """Show what the run left, and which commands to try now."""
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
    other = replace(options, seed=(options.seed + 1) % 2**32)
    show_command(console, ["train", *train_arguments(other, output, model, "model-2")])
    console.paragraph("Every setting and where it comes from:")
    show_command(console, ["config", "show", KEYS["config_path"].cli or "", shown_path(output.config)])
