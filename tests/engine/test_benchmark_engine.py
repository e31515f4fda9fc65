"""What the engine's benchmark makes of its figures: turns, pairs, bounds, limits. Nothing here is timed."""

from __future__ import annotations

import json
import math
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from torchturbo.runtime import current_runtime

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import engine as benchmark  # noqa: E402
import engine_pairs as pairs  # noqa: E402
import engine_steps  # noqa: E402


class Stepper:
    """A program whose steps cost what a list says."""

    def __init__(self, name: str, costs: list[float], seen: list[str]) -> None:
        self.name, self.costs, self.seen = name, iter(costs), seen

    def step(self) -> float:
        self.seen.append(self.name)
        return next(self.costs)


def measured(*steps: float, peaks: tuple[int, ...] = (1,), floors: tuple[int, ...] = (0,)) -> pairs.Measured:
    return pairs.Measured(list(steps), list(peaks), list(floors))


def result(limit: float | None, own: pairs.Measured, other: pairs.Measured) -> benchmark.Result:
    comparison = benchmark.Comparison("name", engine_steps.one_rank, 1, limit, "text")
    return benchmark.Result(comparison, own, other, ("one", "two"))


def test_programs_step_in_turn_and_swap_who_is_first_and_the_first_rounds_do_not_count() -> None:
    seen: list[str] = []
    programs = [Stepper("A", [90, 1, 2, 3], seen), Stepper("B", [90, 4, 5, 6], seen)]
    assert ([1, 2, 3], [4, 5, 6]) == pairs.take_turns(programs, 3, 1)
    assert "ABBAABBA" == "".join(seen)


# One-sided 95 % quantiles from the usual table.
@pytest.mark.parametrize(("degrees", "quantile"), [(5, 2.015), (10, 1.812), (19, 1.729), (30, 1.697), (10**6, 1.645)])
def test_quantiles_of_students_t(degrees: int, quantile: float) -> None:
    assert pytest.approx(quantile, abs=1e-3) == pairs.student(degrees)


def test_a_ratio_is_taken_inside_a_round() -> None:
    # The second round met a machine ten times slower: the ratio of the sums would be 1.9.
    found = pairs.ratio([1.0, 20.0], [1.0, 10.0])
    assert pytest.approx(1.5) == found.mean
    assert (1.0, 2.0) == (found.low, found.high)


def test_the_upper_bound_is_the_means_and_falls_with_more_rounds() -> None:
    costs = [1.0, 1.2] * 10
    found = pairs.ratio(costs, [1.0] * 20)
    deviation = math.sqrt(20 / 19 * 0.01)
    assert pytest.approx(1.1 + 1.729 * deviation / math.sqrt(20), abs=1e-4) == found.upper
    assert found.upper < pairs.ratio(costs[:6], [1.0] * 6).upper
    assert math.inf == pairs.ratio([1.0], [1.0]).upper


def test_a_limit_holds_the_upper_bound_and_not_the_mean() -> None:
    noisy = result(1.05, measured(0.8, 1.2, 0.8, 1.2), measured(1, 1, 1, 1))
    steady = result(1.05, measured(1.04, 1.04, 1.04), measured(1, 1, 1))
    assert pytest.approx(1.0) == noisy.ratio.mean
    assert (False, True) == (noisy.kept, steady.kept)
    assert result(None, measured(9, 9), measured(1, 1)).kept


def test_the_limits_are_the_ones_that_were_set() -> None:
    limits = {comparison.name: comparison.limit for comparison in benchmark.COMPARISONS}
    assert (1.05, 1.05, 0.5) == (limits["trainer"], limits["fsdp2"], limits["muon"])
    assert {"sp", "save", "pause", "export", "export_1"} == {name for name, limit in limits.items() if limit is None}


def test_each_comparison_starts_as_many_ranks_as_it_says() -> None:
    for comparison in benchmark.COMPARISONS:
        sides = comparison.sides()
        assert [comparison.ranks] * 2 == [side.ranks for side in sides], comparison.name
        assert sides[0].name != sides[1].name


def test_ours_is_the_first_program_of_each_pair() -> None:
    names = {comparison.name: comparison.sides()[0].name for comparison in benchmark.COMPARISONS}
    assert ("TurboTrainer", "TurboTrainer, FSDP2", "MuonAdamW") == (names["trainer"], names["fsdp2"], names["muon"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_layout_steps_over_as_many_tokens(device: str) -> None:
    wanted = engine_steps.TOKENS if device == "cpu" else engine_steps.TOKENS_ON_DEVICE
    for ranks, sp_size in ((1, 1), (2, 1), (2, 2)):
        streams = ranks // sp_size
        rows = engine_steps.rows_of(device, ranks, sp_size)
        assert wanted == rows * streams * engine_steps.ACCUMULATION * engine_steps.LENGTH


def test_a_rank_tells_that_it_is_ready_and_what_each_step_cost() -> None:
    parent, child = Pipe()
    turns = pairs.Turns(child, current_runtime(use_cpu=True), 3)
    for _ in range(3):
        parent.send("go")
    done: list[int] = []

    def step() -> None:
        done.append(len(done))
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass

    turns.repeat(step)
    told = [parent.recv() for _ in range(4)]
    assert [0, 1, 2] == done
    assert ["ready", "step", "step", "step"] == [word for word, _ in told]
    assert all(cost >= 0.02 for _, cost in told[1:])


def test_waiting_for_a_turn_costs_nothing() -> None:
    parent, child = Pipe()
    turns = pairs.Turns(child, current_runtime(use_cpu=True), 1)
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    parent.send("go")
    turns.repeat(lambda: None)
    assert ("ready", None) == parent.recv()
    assert parent.recv()[1] < 0.05


@pytest.mark.parametrize("ending", ["failed", "gone"])
def test_a_rank_that_fails_is_named(ending: str) -> None:
    mine, theirs = Pipe()
    if ending == "failed":
        theirs.send(("failed", "Traceback: no such model"))
    theirs.close()
    program = object.__new__(pairs._Program)
    program.side, program.pipes = pairs.Side("the loop", lambda *_: None, 1, {}), [mine]
    with pytest.raises(RuntimeError, match="(?s)the loop, rank 0: .*(no such model|the process is gone)") as raised:
        program.expect("step")
    assert ("no such model" in str(raised.value)) == (ending == "failed")


def test_memory_is_that_of_the_rank_that_needs_most_over_its_floor() -> None:
    assert 70 == measured(1.0, peaks=(100, 90), floors=(40, 20)).own


def test_rounds_are_shared_out_over_the_starts_and_joined_again() -> None:
    assert [5, 5, 5, 5] == pairs.shares(20, 4)
    assert [3, 2, 2] == pairs.shares(7, 3)
    assert [1, 1] == pairs.shares(2, 4)
    parts = [measured(1, 2, peaks=(50, 90), floors=(10, 60)), measured(3, peaks=(60, 80), floors=(30, 10))]
    assert measured(1, 2, 3, peaks=(50, 80), floors=(10, 10)) == pairs.joined(parts)


def test_every_figure_is_in_the_json() -> None:
    found = result(1.05, measured(2, 4), measured(1, 2))
    figures: dict[str, Any] = json.loads(benchmark.as_json([found]))["name"]
    assert {"ratio", "one", "two"} == figures.keys()
    assert [2, 4] == figures["one"]["steps"]
    assert 2.0 == figures["ratio"]["mean"]


def test_a_missed_limit_is_the_exit_status_only_with_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = result(1.05, measured(2, 2), measured(1, 1))
    monkeypatch.setattr(benchmark, "compare", lambda *_: slow)
    for words, status in ((["--check"], 1), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["engine.py", "--only", "trainer", "--rounds", "2", *words])
        assert status == benchmark.main()
        said = capsys.readouterr()
        assert "missed: text" in said.err
        assert "| text | 2.00 | 1.00 | 2.000 | 2.000 |" in said.out


def test_without_enough_devices_a_comparison_is_left_out_with_the_reason() -> None:
    assert benchmark.why_not(2, "cpu") is None
    here = current_runtime().device_count()
    assert f"it needs 99 devices, here is {here}" == benchmark.why_not(99, "cuda")
