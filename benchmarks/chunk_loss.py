"""Measure the chunked loss: time and memory of head and cross-entropy, forward and backward, against the plain path.

Every variant runs once in a round, in turn, and a ratio is taken inside a round. The figure is the CPU time of the
process, user and system, which other work on the machine moves less than the clock. Memory is the high-water mark of
the resident set of a process of its own that takes one step, less that of a process that only holds what any variant
needs: hidden states, weight, and the gradients of both. What is left is the logits' share. Timings belong to a quiet
machine and to people: nothing in CI runs this.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear_cross_entropy
from transformers.loss.loss_utils import ForCausalLMLoss

from torchturbo.objectives import chunked

PLAIN, FORWARD, RECOMPUTE = "plain", "torchturbo, gradient in forward", "torchturbo, recompute"
FLOOR = "floor"
SAME_CHUNK, ITS_CHOICE = "linear_cross_entropy, same chunk", "linear_cross_entropy, its own choice"
NO_OPTIONS = "linear_cross_entropy, no options"


class Target(NamedTuple):
    """A limit that the chunked loss keeps."""

    text: str
    variant: str
    figure: str
    limit: float
    at_least: bool


TARGETS = (
    Target("logits' share of the peak, gradient in forward: times smaller", FORWARD, "memory", 6.0, True),
    Target("logits' share of the peak, recompute: times smaller", RECOMPUTE, "memory", 6.0, True),
    Target("time, gradient in forward: times plain", FORWARD, "time", 1.1, False),
    Target("time, recompute: times plain", RECOMPUTE, "time", 1.6, False),
)


class Shape(NamedTuple):
    """Sizes of a step."""

    rows: int
    vocabulary: int
    width: int
    chunk: int


class OtherLinear(nn.Linear):
    """A head that is no plain ``nn.Linear`` as far as anyone can know, so that it is recomputed."""


class Model(nn.Module):
    """What comes after a backbone: a head and Transformers' loss."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        """Name the head as Transformers' models do."""
        return self.head

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits [1, N, V] of hidden states [1, N, H]."""
        logits = self.head(hidden)
        return ForCausalLMLoss(logits, labels, self.head.out_features), logits


class Operands(NamedTuple):
    """One step's hidden states [1, N, H], labels [1, N], and head."""

    hidden: Tensor
    labels: Tensor
    head: nn.Linear


def operands(shape: Shape, kind: type[nn.Linear] = nn.Linear) -> Operands:
    """Make them, always the same."""
    torch.manual_seed(0)
    hidden = torch.randn(1, shape.rows, shape.width, requires_grad=True)
    labels = torch.randint(shape.vocabulary, (1, shape.rows))
    head = kind(shape.width, shape.vocabulary, bias=False)
    return Operands(hidden, labels, head)


def model_loss(given: Operands, shape: Shape, chunks: bool) -> Tensor:
    """Return the loss of a model, with chunks or without."""
    model = Model(given.head)
    if not chunks:
        loss, logits = model(given.hidden, given.labels)
        del logits
        return loss  # type: ignore[no-any-return]
    chunked.install(model, shape.chunk)
    try:
        loss, logits = model(given.hidden, labels=given.labels)
    finally:
        chunked.remove(model)
    assert logits is None
    return loss  # type: ignore[no-any-return]


def torch_loss(given: Operands, shape: Shape, options: Any) -> Tensor:
    """Return the loss of torch's own function."""
    shifted = nn.functional.pad(given.labels, (0, 1), value=-100)[0, 1:]
    return linear_cross_entropy(given.hidden[0], given.head.weight, shifted, options=options)


def same_chunk(shape: Shape) -> Any:
    """Return the options with which torch's function uses our chunks."""
    return nn.LinearCrossEntropyOptions(batch_chunk_size=shape.chunk, chunking_method=None)


VARIANTS: dict[str, tuple[type[nn.Linear], Callable[[Operands, Shape], Tensor]]] = {
    PLAIN: (nn.Linear, lambda given, shape: model_loss(given, shape, chunks=False)),
    FORWARD: (nn.Linear, lambda given, shape: model_loss(given, shape, chunks=True)),
    RECOMPUTE: (OtherLinear, lambda given, shape: model_loss(given, shape, chunks=True)),
    NO_OPTIONS: (nn.Linear, lambda given, shape: torch_loss(given, shape, None)),
    SAME_CHUNK: (nn.Linear, lambda given, shape: torch_loss(given, shape, same_chunk(shape))),
    ITS_CHOICE: (nn.Linear, lambda given, shape: torch_loss(given, shape, nn.LinearCrossEntropyOptions())),
}


def step(name: str, given: Operands, shape: Shape) -> float:
    """Run a variant forward and backward, and return its loss."""
    given.hidden.grad = given.head.weight.grad = None
    loss = VARIANTS[name][1](given, shape)
    loss.backward()
    return float(loss.detach())


def high_water_mark() -> int:
    """Return the most memory that this process has had resident, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def take_memory_step(name: str, shape: Shape) -> int:
    """Take one step in this process and return its high-water mark."""
    given = operands(shape, VARIANTS[name][0] if name != FLOOR else nn.Linear)
    small = Shape(16, 64, 8, 8)
    step(PLAIN if name == FLOOR else name, operands(small), small)  # loads what a first step loads
    if name == FLOOR:
        given.hidden.grad, given.head.weight.grad = torch.ones_like(given.hidden), torch.ones_like(given.head.weight)
    else:
        step(name, given, shape)
    return high_water_mark()


def memory(names: list[str], shape: Shape, threads: int) -> dict[str, int]:
    """Return the logits' share of each variant's peak, in bytes, each from a process of its own."""
    marks = {}
    for name in (FLOOR, *names):
        words = [sys.executable, __file__, "--memory-of", name, "--threads", str(threads)]
        words += [word for field, value in shape._asdict().items() for word in (f"--{field}", str(value))]
        marks[name] = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {name: marks[name] - marks[FLOOR] for name in names}


def times(names: list[str], shape: Shape, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return each variant's CPU and wall-clock seconds, round by round."""
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    losses = {}
    for at in range(-1, rounds):
        size = shape if at >= 0 else shape._replace(rows=min(shape.rows, 256))  # the first round is no measurement
        for name in names:
            given = operands(size, VARIANTS[name][0])
            clocks = time.process_time(), time.perf_counter()
            losses[name] = step(name, given, size)
            if at >= 0:
                cpu[name].append(time.process_time() - clocks[0])
                wall[name].append(time.perf_counter() - clocks[1])
            del given
    far = {name: loss for name, loss in losses.items() if abs(loss / losses[PLAIN] - 1) > 1e-5}
    if far:
        raise SystemExit(f"not the plain loss {losses[PLAIN]}: {far}")
    return cpu, wall


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Return a variant's times over plain's, round by round."""
    return [own / plain for own, plain in zip(seconds[name], seconds[PLAIN], strict=True)]


def report(shape: Shape, cpu: dict[str, list[float]], wall: dict[str, list[float]], share: dict[str, int]) -> list[str]:
    """Print the tables, and return the targets that were missed."""
    print(
        f"{shape.rows} rows, vocabulary {shape.vocabulary}, hidden {shape.width}, fp32, chunk {shape.chunk}; ", end=""
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, CPython {platform.python_version()}, ")
    print(f"{torch.get_num_threads()} threads, {len(cpu[PLAIN])} rounds\n")
    print("| variant | CPU s | x plain | spread | clock x plain | logits' share MB | x smaller |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in cpu:
        own = ratios(cpu, name)
        print(
            f"| {name} | {statistics.median(cpu[name]):.1f} | {statistics.median(own):.2f} | "
            f"{min(own):.2f} to {max(own):.2f} | {statistics.median(ratios(wall, name)):.2f} | "
            f"{share[name] / 1e6:.0f} | {share[PLAIN] / share[name]:.1f} |"
        )
    print("\n| target | measured | limit |\n| --- | ---: | ---: |")
    missed = []
    for target in TARGETS:
        figure = (
            statistics.median(ratios(cpu, target.variant))
            if target.figure == "time"
            else share[PLAIN] / share[target.variant]
        )
        kept = figure >= target.limit if target.at_least else figure <= target.limit
        print(f"| {target.text} | {figure:.2f} | {'at least' if target.at_least else 'at most'} {target.limit} |")
        missed += [] if kept else [target.text]
    return missed


def main() -> int:
    """Measure, and say whether the targets were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    parser.add_argument("--json", action="store_true", help="print every figure")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="measure these beside plain and our own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--memory-of", choices=[FLOOR, *VARIANTS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape = Shape(given.rows, given.vocabulary, given.width, given.chunk)
    if given.memory_of:
        print(take_memory_step(given.memory_of, shape))
        return 0
    names = [name for name in VARIANTS if given.only is None or name in (PLAIN, FORWARD, RECOMPUTE, *given.only)]
    share = memory(names, shape, given.threads)
    cpu, wall = times(names, shape, given.rounds)
    missed = report(shape, cpu, wall, share)
    if given.json:
        print(json.dumps({"shape": shape._asdict(), "cpu": cpu, "wall": wall, "share": share}))
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
