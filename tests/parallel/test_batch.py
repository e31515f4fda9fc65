"""Batch arithmetic: accumulation from the global batch, and errors that show every factor."""

from __future__ import annotations

import itertools

import pytest

from torchturbo.parallel.batch import BatchPlan, accumulation_steps, batch_problem, nearest_gbs


@pytest.mark.parametrize(
    ("gbs", "world", "sp", "steps"),
    [
        (1, 1, 1, 1),
        (6, 1, 1, 6),
        (8, 2, 1, 4),
        (2, 8, 8, 2),
        (4, 4, 2, 2),
        (3, 2, 1, None),
        (1, 2, 1, None),
        (3, 4, 2, None),
    ],
)
def test_accumulation_is_gbs_times_sp_over_world(gbs: int, world: int, sp: int, steps: int | None) -> None:
    """A whole number of at least one, or nothing."""
    assert accumulation_steps(gbs, world, sp) == steps


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("gbs", range(1, 20))
def test_what_is_suggested_is_valid_and_nearest(gbs: int, world: int) -> None:
    """Each suggestion divides, and no valid value lies between it and what was given."""
    valid = [value for value in range(1, 60) if accumulation_steps(value, world)]

    suggested = nearest_gbs(gbs, world)

    assert set(suggested) <= set(valid)
    assert min(abs(value - gbs) for value in suggested) == min(abs(value - gbs) for value in valid)


def test_the_error_shows_all_factors_and_what_to_do() -> None:
    """The reader has the launch command, the file and the variable to choose from."""
    problem = batch_problem(3, 2, 1, place="turbo.yaml:1:6")

    assert str(problem) == (
        "turbo.yaml:1:6: gbs: accumulation = gbs * sp_size / world_size = 3 * 1 / 2 = 1.5 is no whole number of steps;"
        " use 2 or 4 (a multiple of the 2 data-parallel ranks), or another number of ranks"
    )


def test_a_plan_counts_sequences_once_per_group() -> None:
    """Ranks of one sequence group share a micro-batch."""
    plan = BatchPlan(micro_batch=4, accumulation=2, world_size=8, sp_size=2)

    assert (plan.dp_size, plan.gbs, plan.sequences) == (4, 8, 32)
    assert str(plan) == "micro-batch 4 x accumulation 2 x data-parallel ranks 4 = 32 sequences per step"


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24, 25])
def test_steps_are_the_trainers(rows: int, drop_last: bool) -> None:
    """The number said at the start is the number of steps the loop takes (micro-batch 2, accumulation 2, 2 ranks)."""
    rounds = rows // 4 if drop_last else -(-rows // 4)

    assert BatchPlan(2, 2, 2).steps(rows, 3, drop_last=drop_last) == 3 * max(1, -(-rounds // 2))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (8, 8)])
def test_steps_are_those_of_dealing_rows_out(world: int, sp: int, drop_last: bool) -> None:
    """Counted by hand: rows go to the data-parallel ranks, batch by batch, and a window of batches is a step.

    https://github.com/modelscope/ms-swift/issues/5140 counted the ranks of a sequence group apart.
    """
    for micro_batch, accumulation, rows in itertools.product((1, 2, 3), (1, 2, 4), (1, 5, 12, 23, 48)):
        plan = BatchPlan(micro_batch, accumulation, world, sp)
        left, rounds = rows, 0
        while left >= micro_batch * plan.dp_size or (left > 0 and not drop_last):
            left -= micro_batch * plan.dp_size
            rounds += 1
        windows = len(range(0, rounds, accumulation))
        assert plan.steps(rows, 2, drop_last=drop_last) == 2 * max(1, windows)
        assert plan.gbs == accumulation * world // sp
