"""What may differ on a resume: the mesh, as long as every step sees the same samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import launch

from torchturbo.checkpoint.record import run_facts, write_record
from torchturbo.checkpoint.resume import format_problem, resume_problems, tell_objectives
from torchturbo.parallel.batch import BatchPlan

ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-3, "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "seed": 1, "dataloader_drop_last": False, "train_sampling_strategy": "random",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration files are written where a launch begins."""
    monkeypatch.chdir(tmp_path)


def facts(world_size: int, accumulation: int, sp_size: int = 1, **changes: Any) -> dict[str, Any]:
    args = SimpleNamespace(**(ARGUMENTS | {"gradient_accumulation_steps": accumulation} | changes))
    return run_facts(args, BatchPlan(2, accumulation, world_size, sp_size), {})


def compared(
    folder: Path, before: dict[str, Any], after: dict[str, Any], saved: str = "{}", now: str = "{}", *words: str
) -> list[tuple[str, str]]:
    """Return key and message of every problem."""
    configs = [
        launch(line, file=text, name=name) for text, name, line in ((saved, "a.json", []), (now, "b.json", list(words)))
    ]
    assert all(made.config is not None for made in configs)
    write_record(folder, configs[0].config, before, 2)  # type: ignore[arg-type]
    problems, _ = resume_problems(folder, configs[1].config, after, "--tt_resume_allow")  # type: ignore[arg-type]
    return [(problem.key, problem.message) for problem in problems]


@pytest.mark.parametrize(
    ("before", "after", "saved", "now"),
    [
        (facts(2, 2), facts(1, 4), "{}", "{}"),
        (facts(1, 4), facts(4, 1), '{"gbs": 4}', '{"gbs": 4}'),
        (facts(2, 4), facts(4, 4, sp_size=2), "{}", '{"parallel_plan": {"sp_size": 2}}'),
        (facts(4, 1), facts(4, 4, sp_size=4), '{"gbs": 4}', '{"gbs": 4, "parallel_plan": {"sp_size": 4}}'),
        (facts(2, 2), facts(2, 2), '{"parallel_plan": {"ep_size": 2}}', "{}"),
        (facts(2, 2), facts(2, 2), "{}", '{"gbs": 4}'),
    ],
    ids=["fewer ranks", "more ranks", "sequences divided", "all of them", "experts together", "gbs said"],
)
def test_another_mesh_of_the_same_steps_is_no_difference(
    before: dict[str, Any], after: dict[str, Any], saved: str, now: str, tmp_path: Path
) -> None:
    """Accumulation makes up for it."""
    assert [] == compared(tmp_path, before, after, saved, now)


@pytest.mark.parametrize(
    ("before", "after", "saved", "now", "key"),
    [
        (facts(2, 2), facts(4, 2), "{}", "{}", "world_size"),
        (facts(2, 2), facts(2, 4), "{}", "{}", "gradient_accumulation_steps"),
        (facts(2, 2), facts(2, 4), '{"gbs": 4}', '{"gbs": 8}', "gbs"),
        (facts(2, 2), facts(2, 2, sp_size=2), "{}", '{"parallel_plan": {"sp_size": 2}}', "micro_batches_per_step"),
    ],
)
def test_other_steps_are_one_difference_under_the_name_of_its_cause(
    before: dict[str, Any], after: dict[str, Any], saved: str, now: str, key: str, tmp_path: Path
) -> None:
    """Not one for each number that follows from it; and it can be allowed."""
    ((found, message),) = compared(tmp_path, before, after, saved, now)
    assert key == found
    assert "samples would be skipped or seen twice" in message
    assert [] == compared(tmp_path, before, after, saved, now, "--tt_resume_allow", key)


def test_orders_that_depend_on_the_ranks_are_compared(tmp_path: Path) -> None:
    """Rows that are dropped where they fill no round, and groups of equal length."""
    for change, key in (
        ({"dataloader_drop_last": True}, "data_parallel_ranks"),
        ({"train_sampling_strategy": "batch_rebalance"}, "data_parallel_ranks"),
        ({"train_sampling_strategy": "group_by_length"}, "length_group_rows"),
        ({"group_by_length": True}, "length_group_rows"),
    ):
        ((found, message),) = compared(tmp_path, facts(2, 2, **change), facts(1, 4, **change))
        assert key == found
        assert "samples would be skipped or seen twice" in message


def test_the_optimizer_can_never_differ(tmp_path: Path) -> None:
    """Its saved state fits no other."""
    changed = '{"optimizer": {"name": "muon"}}'
    words = ["--tt_resume_allow", "optimizer.name"]
    assert ["optimizer.name"] == [key for key, _ in compared(tmp_path, facts(1, 4), facts(1, 4), "{}", changed, *words)]


@pytest.mark.parametrize(
    ("saved", "now", "key"),
    [
        ('{"mtp": {"enabled": true}}', '{"mtp": {"enabled": true}, "dspark": {"enabled": false}}', "dspark.enabled"),
        (
            '{"mtp": {"enabled": true}}',
            '{"mtp": {"enabled": true, "loss_scaling_factor": 0}}',
            "mtp.loss_scaling_factor",
        ),
    ],
)
def test_heads_can_not_leave_training(saved: str, now: str, key: str, tmp_path: Path) -> None:
    """Under the name of what takes them out, whatever is allowed; where there are none it is no difference."""
    same = facts(1, 1)
    ((told, message),) = compared(tmp_path, same, same, saved, now, "--tt_resume_allow", key)[:1]
    assert key == told
    assert "other parameters would be trained" in message
    assert [] == compared(tmp_path, same, same, "{}", now.replace("true", "false"))


def test_another_weight_of_a_loss_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With both values; a weight that is written out and the default are one."""
    same = facts(1, 1)
    saved = '{"mtp": {"enabled": true}, "moe": {"aux_loss_coeff": 0.01}}'
    now = '{"mtp": {"enabled": true, "loss_scaling_factor": 0.3}, "dspark": {"num_anchors": 512}}'
    assert [] == compared(tmp_path, same, same, saved, now)
    config = launch([], file=now, name="b.json").config
    assert config is not None
    tell_objectives(tmp_path, config)
    text = " ".join("".join(capfd.readouterr()).split())
    assert "another mtp.loss_scaling_factor: 0.1 in the checkpoint's run, 0.3 in this one" in text
    assert "another moe.aux_loss_coeff: 0.01 in the checkpoint's run, 0.0 in this one" in text
    assert "num_anchors" not in text


def test_a_record_without_the_size_of_a_step_is_compared_as_it_was(tmp_path: Path) -> None:
    """One of an earlier version."""
    before = {name: value for name, value in facts(2, 2).items() if name != "micro_batches_per_step"}
    assert ["world_size"] == [key for key, _ in compared(tmp_path, before, facts(1, 4))]


def test_whole_checkpoints_are_for_one_process(tmp_path: Path) -> None:
    """And native ones for any."""
    problem = format_problem(tmp_path, sharded=True)
    assert problem is not None
    assert "a sharded run reads its shards from native/" in problem.message
    assert format_problem(tmp_path, sharded=False) is None
    (tmp_path / "native").mkdir()
    assert format_problem(tmp_path, sharded=True) is None
