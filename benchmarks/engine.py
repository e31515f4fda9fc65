"""Measure the engine against what it stands on: Hugging Face's Trainer, a bare ``fully_shard`` loop, DCP, ``torch.optim``.

Both programs of a comparison run at the same time and take turns, step by step (``engine_pairs.py``); a ratio is taken
inside a round. Each limit is held against the upper 95 % bound of the mean ratio, not against the mean. The programs are
in ``engine_steps.py``, ``engine_save.py``, ``engine_export.py`` and ``engine_muon.py``. Timings belong to a quiet
machine and to people: nothing in CI runs this.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import engine_export
import engine_muon
import engine_save
import engine_steps
import torch
import transformers
from engine_pairs import Measured, Ratio, Side, measure, ratio

from torchturbo.checkpoint.hf_export import MAX_SHARD_SIZE
from torchturbo.runtime import current_runtime

MB = 1e6


class Comparison(NamedTuple):
    """One program held against another."""

    name: str
    sides: Callable[[], tuple[Side, Side]]
    ranks: int
    limit: float | None = None
    """The most that the upper bound of the ratio may be; None where no limit was set."""
    text: str = ""
    """What the ratio is."""


def exports(ranks: int) -> tuple[Side, Side]:
    """Return an export and ``save_pretrained`` of the same model, gathered first where there are several ranks."""
    settings = {"moe": False, "max_shard_size": MAX_SHARD_SIZE}
    return (
        Side("export", engine_export.ours, ranks, settings),
        Side("save_pretrained", engine_export.save_pretrained, ranks, settings),
    )


def muon() -> tuple[Side, Side]:
    """Return a step of our Muon and one of torch's on the same sharded matrices, both iterating in bf16."""
    torchs, ours = engine_muon.muon_steps()
    return ours, torchs


COMPARISONS = (
    Comparison("trainer", engine_steps.one_rank, 1, 1.05, "step of TurboTrainer over Trainer, 1 rank"),
    Comparison("fsdp2", engine_steps.two_ranks, 2, 1.05, "step of TurboTrainer over a fully_shard loop, 2 ranks"),
    Comparison("sp", engine_steps.sequences, 2, None, "step with sp_size 2 over sp_size 1, equal tokens, 2 ranks"),
    Comparison("muon", muon, 2, 1 / engine_muon.LIMIT, "Muon step over torch.optim.Muon on DTensors, 2 ranks"),
    Comparison("save", engine_save.whole, 2, None, "native save over dcp.save, 2 ranks"),
    Comparison("pause", engine_save.pause, 2, None, "pause of training for a save over dcp.save, 2 ranks"),
    Comparison("export", partial(exports, 2), 2, None, "export over save_pretrained, 2 ranks"),
    Comparison("export_1", partial(exports, 1), 1, None, "export over save_pretrained, 1 rank"),
)
NAMES = tuple(comparison.name for comparison in COMPARISONS)


class Result(NamedTuple):
    """What came of a comparison."""

    comparison: Comparison
    own: Measured
    other: Measured
    names: tuple[str, str]

    @property
    def ratio(self) -> Ratio:
        """The first program's cost over the second's."""
        return ratio(self.own.steps, self.other.steps)

    @property
    def kept(self) -> bool:
        """Whether there is no limit or it was kept."""
        return self.comparison.limit is None or self.ratio.upper <= self.comparison.limit


def compare(comparison: Comparison, rounds: int, device: str) -> Result:
    """Run one comparison."""
    first, second = comparison.sides()
    own, other = measure(first, second, rounds, device)
    return Result(comparison, own, other, (first.name, second.name))


def why_not(ranks: int, device: str) -> str | None:
    """Return why a comparison can't run on a device; None where it can."""
    if device == "cpu":
        return None
    found = current_runtime().device_count()
    return f"it needs {ranks} devices, here is {found}" if found < ranks else None


def print_head(rounds: int, device: str) -> None:
    """Print what ran where, and the head of the table."""
    runtime = current_runtime(use_cpu=device == "cpu")
    figure = "CPU s" if device == "cpu" else "s"
    print(
        f"{runtime.device_name()}; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"CPython {platform.python_version()}; one thread a rank, {rounds} rounds\n"
    )
    print(f"| | {figure} | {figure}, other | ratio | upper 95 % | spread | MB | MB, other | limit |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")


def print_row(result: Result) -> None:
    """Print a comparison."""
    comparison, found = result.comparison, result.ratio
    own, other = statistics.median(result.own.steps), statistics.median(result.other.steps)
    limit = "" if comparison.limit is None else f"{comparison.limit}"
    print(
        f"| {comparison.text} | {own:.2f} | {other:.2f} | {found.mean:.3f} | {found.upper:.3f} | "
        f"{found.low:.2f} to {found.high:.2f} | {max(result.own.peaks) / MB:.0f} | {max(result.other.peaks) / MB:.0f} | "
        f"{limit} |",
        flush=True,
    )


def as_json(results: list[Result]) -> str:
    """Return every figure."""
    figures: dict[str, Any] = {
        result.comparison.name: {
            "ratio": result.ratio._asdict(),
            **{name: side._asdict() for name, side in zip(result.names, (result.own, result.other), strict=True)},
        }
        for result in results
    }
    return json.dumps(figures)


def main() -> int:
    """Measure, and say whether the limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--json", action="store_true", help="print every figure")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: a bound needs two rounds or more")
    wanted = given.only or NAMES
    print_head(given.rounds, given.device)
    results: list[Result] = []
    left_out = []
    for comparison in COMPARISONS:
        if comparison.name not in wanted:
            continue
        if reason := why_not(comparison.ranks, given.device):
            left_out.append(f"{comparison.name}: {reason}")
            continue
        results.append(compare(comparison, given.rounds, given.device))
        print_row(results[-1])
    if given.json:
        print(as_json(results))
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    missed = [result.comparison.text for result in results if not result.kept]
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
