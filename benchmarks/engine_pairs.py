"""Two programs that train at the same time and take turns: step against step, in one run.

Each program is one or more processes of its own, its ranks. Every rank waits on a pipe before a step, takes it, and
tells what it cost; the parent lets one program at a time take a step, and swaps who goes first from round to round.
So no program runs beside the other, and both meet the same machine: a ratio is taken inside a round. On a CPU the
figure is the CPU time of the ranks, added up; waiting costs none. On an accelerator it is the time of the slowest rank
by the clock, with the device's queue emptied before and after.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchturbo.runtime import Runtime, current_runtime

WARM_UP = 2
"""Rounds of each start before the first that counts: allocators, caches of kernels, the optimizer's state."""
STARTS = 4
"""Times that the programs are started anew."""
PATIENCE = 600.0
"""Seconds that a step or the start of a program may take."""
CONFIDENCE = 0.95
PRELOAD = ["torch.distributed.checkpoint", "transformers.trainer", "transformers.models.llama.modeling_llama"]
PRELOAD += ["torchturbo.adapters.hf_trainer", "torchturbo.checkpoint.native"]
"""What every program imports: by the server that its processes are forked from, so that none pays for it."""


class Turns:
    """A rank's end of the pipe: what a program calls around each of its steps."""

    def __init__(self, pipe: Connection, runtime: Runtime, count: int) -> None:
        self.pipe, self.runtime, self.count = pipe, runtime, count
        self.taken = 0
        self.started = 0.0

    def clock(self) -> float:
        """Return seconds: of this process's CPU time, or of the clock once the device is idle."""
        if self.runtime.device_type == "cpu":
            return time.process_time()
        self.runtime.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """Wait until it is this program's turn. The first call says that the program is ready."""
        if self.taken == 0:
            self.pipe.send(("ready", None))
        self.pipe.recv()
        self.started = self.clock()

    def end(self) -> bool:
        """Tell what the step cost, and return whether there is another one."""
        cost = self.clock() - self.started
        self.taken += 1
        self.pipe.send(("step", cost))
        return self.taken < self.count

    def repeat(self, step: Callable[[], Any]) -> None:
        """Take all steps of a program that is nothing but a function."""
        more = True
        while more:
            self.begin()
            step()
            more = self.end()


class Side(NamedTuple):
    """One program of a pair."""

    name: str
    program: Callable[[int, Turns, dict[str, Any]], None]
    """Called on each rank with its number, its turns and the settings; stands at the top of its module."""
    ranks: int
    settings: dict[str, Any]


class Measured(NamedTuple):
    """What one program cost."""

    steps: list[float]
    """Seconds of each step that counts."""
    peaks: list[int]
    """High-water mark of each rank's memory in bytes: resident set on a CPU (``VmHWM``), allocated on a device."""
    floors: list[int]
    """The same before the program began: the interpreter and what it imports."""

    @property
    def own(self) -> int:
        """Return the bytes over the floor of the rank that needs the most of them."""
        return max(peak - floor for peak, floor in zip(self.peaks, self.floors, strict=True))


class Ratio(NamedTuple):
    """One program's cost over another's, round by round."""

    mean: float
    upper: float
    """Upper bound of the mean, one-sided: :data:`CONFIDENCE`, by Student's t."""
    low: float
    high: float


def ratio(own: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return what the pairs say of ``own / other``."""
    pairs = [one / two for one, two in zip(own, other, strict=True)]
    mean = statistics.fmean(pairs)
    spread = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return Ratio(mean, mean + student(len(pairs) - 1) * spread, min(pairs), max(pairs))


def student(degrees: int) -> float:
    """Return the quantile of Student's t at :data:`CONFIDENCE`, to 3 decimals from 5 degrees of freedom on.

    Expansion around the normal quantile: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if degrees < 1:
        return math.inf
    z = statistics.NormalDist().inv_cdf(CONFIDENCE)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def turn_order(rounds: int) -> Iterable[tuple[int, int]]:
    """Yield who goes first and second in each round: they swap, so that neither always follows the other."""
    for at in range(rounds):
        yield (0, 1) if at % 2 == 0 else (1, 0)


def measure(
    first: Side, second: Side, rounds: int, device: str, warm_up: int = WARM_UP, starts: int = STARTS
) -> tuple[Measured, Measured]:
    """Run a pair and return what each cost.

    The rounds are shared out over several starts of both programs: where a process's memory happens to lie makes all of
    its steps a little faster or slower, and more rounds of the same two processes would not show that.

    Raises
    ------
    RuntimeError
        With the traceback of a rank that failed.

    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # an idle thread then takes no CPU time
    found = [_measure_once(first, second, share, device, warm_up) for share in shares(rounds, starts)]
    own, other = zip(*found, strict=True)
    return joined(own), joined(other)


def shares(rounds: int, starts: int) -> list[int]:
    """Return how many rounds each start gets: as equal as can be, and none without a round."""
    starts = min(starts, rounds)
    return [rounds // starts + (at < rounds % starts) for at in range(starts)]


def joined(parts: Sequence[Measured]) -> Measured:
    """Return several starts of one program as one: all steps, and for each rank the start that needed most memory."""
    ranks = zip(*(zip(part.peaks, part.floors, strict=True) for part in parts), strict=True)
    most = [max(figures, key=lambda figure: figure[0] - figure[1]) for figures in ranks]
    return Measured(
        [step for part in parts for step in part.steps], [peak for peak, _ in most], [floor for _, floor in most]
    )


def _measure_once(first: Side, second: Side, rounds: int, device: str, warm_up: int) -> tuple[Measured, Measured]:
    programs = [_Program(side, rounds + warm_up, device) for side in (first, second)]
    try:
        for program in programs:
            program.expect("ready")
        costs = take_turns(programs, rounds, warm_up)
        memory = [program.expect("ended") for program in programs]
    finally:
        for program in programs:
            program.close()
    one, two = (
        Measured(cost, [peak for peak, _ in figures], [floor for _, floor in figures])
        for cost, figures in zip(costs, memory, strict=True)
    )
    return one, two


class Steps(Protocol):
    """Something that takes a step and returns what it cost."""

    def step(self) -> float:
        """Take a step."""
        ...


def take_turns(programs: Sequence[Steps], rounds: int, warm_up: int) -> tuple[list[float], list[float]]:
    """Let two programs step in turn, and return what their steps cost after the first few rounds."""
    costs: tuple[list[float], list[float]] = ([], [])
    for at, order in enumerate(turn_order(rounds + warm_up)):
        for which in order:
            cost = programs[which].step()
            if at >= warm_up:
                costs[which].append(cost)
    return costs


class _Program:
    """The processes of one side."""

    def __init__(self, side: Side, steps: int, device: str) -> None:
        self.side, self.device = side, device
        self.folder = tempfile.TemporaryDirectory(prefix="engine-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(side.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=enter, args=(side, rank, self.folder.name, theirs, steps, device))
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def expect(self, wanted: str) -> list[Any]:
        """Return what every rank has to say next."""
        return [self._receive(rank, pipe, wanted) for rank, pipe in enumerate(self.pipes)]

    def _receive(self, rank: int, pipe: Connection, wanted: str) -> Any:
        where = f"{self.side.name}, rank {rank}"
        if not pipe.poll(PATIENCE):
            raise RuntimeError(f"{where}: no answer in {PATIENCE:.0f} s, waiting for {wanted!r}")
        try:
            word, value = pipe.recv()
        except EOFError:
            raise RuntimeError(f"{where}: the process is gone, waiting for {wanted!r}") from None
        if word != wanted:
            raise RuntimeError(f"{where}: {word} instead of {wanted}\n{value}")
        return value

    def step(self) -> float:
        """Let every rank take a step, and return what it cost."""
        for pipe in self.pipes:
            pipe.send("go")
        costs = self.expect("step")
        return sum(costs) if self.device == "cpu" else max(costs)

    def close(self) -> None:
        """End the processes: one that still waits for its turn finds its pipe closed."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10.0)
            process.kill()
        self.folder.cleanup()


def enter(side: Side, rank: int, folder: str, pipe: Connection, steps: int, device: str) -> None:
    """Be one rank of a program."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - Trainer prints its logs
    try:
        import torch
        import torch.distributed as dist

        gc.freeze()  # what the server imported is no garbage
        torch.set_num_threads(1)
        if side.ranks > 1:  # to one process without them Trainer is no distributed run, so that it wraps no model
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(side.ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        if device != "cpu":
            torch.accelerator.set_device_index(rank)
        runtime = current_runtime(use_cpu=device == "cpu")
        if side.ranks > 1:
            where = f"file://{Path(folder, 'store')}"
            backend = runtime.distributed_backend
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=side.ranks)
        floor = runtime.peak_memory() or 0
        side.program(
            rank, Turns(pipe, runtime, steps), side.settings | {"device": device, "folder": folder, "ranks": side.ranks}
        )
        peak = runtime.peak_memory() or 0
        if side.ranks > 1:
            dist.barrier()  # a rank that leaves first would take the connections of the others with it
            dist.destroy_process_group()
        pipe.send(("ended", (peak, floor)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)
