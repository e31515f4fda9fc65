"""The same run on every layout: losses and gradient norms of Hugging Face's own Trainer in one process, to 5 decimals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acceptance
import pytest
from ranks import run_ranks

History = dict[int, tuple[float, float]]
LAYOUTS = {
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "2 ranks, ep 2": (2, ["--tt_ep_size", "2"]),
    "2 ranks, sp 2": (2, ["--tt_sp_size", "2"]),
    "2 ranks, sp 2, ep 2": (2, ["--tt_sp_size", "2", "--tt_ep_size", "2"]),
    "4 ranks, sp 2, ep 2": (4, ["--tt_sp_size", "2", "--tt_ep_size", "2"]),
    "4 ranks, ep 4": (4, ["--tt_ep_size", "4"]),
    "4 ranks, sp 4": (4, ["--tt_sp_size", "4"]),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> History:
    found: History = run_ranks(1, stock, str(tmp_path_factory.mktemp("stock")))[0]
    return found


def stock(rank: int, folder: str) -> History:
    return acceptance.stock(Path(folder))


def words(layout: str) -> tuple[int, list[str]]:
    world_size, plan = LAYOUTS[layout]
    return world_size, ["--tt_gbs", "4", *plan]


def assert_same(expected: History, found: History) -> None:
    assert expected.keys() == found.keys()
    for step, pair in expected.items():
        assert found[step] == pytest.approx(pair, rel=0, abs=5e-6), step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(layout: str, expected: History, tmp_path: Path) -> None:
    """Same rows in every step, same mean over their targets, same norm."""
    world_size, line = words(layout)

    for found in run_ranks(world_size, acceptance.run, str(tmp_path), line):
        assert_same(expected, found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2 ranks, ep 2", "4 ranks, sp 2, ep 2"),
        ("2 ranks, ep 2", "1 rank"),
        ("1 rank", "2 ranks, sp 2, ep 2"),
    ],
)
def test_a_resume_onto_another_layout_goes_on_as_it_was(
    before: str, after: str, expected: History, tmp_path: Path
) -> None:
    """The second half on another layout: nobody has to allow it, and the steps see the same rows."""
    first, second = words(before), words(after)
    save = {"save_strategy": "steps", "save_steps": 2}
    run_ranks(first[0], acceptance.run, str(tmp_path), first[1], "qwen3_moe", None, save)

    for found in run_ranks(
        second[0], acceptance.run, str(tmp_path / "rest"), second[1], "qwen3_moe", tmp_path / "checkpoint-2"
    ):
        assert_same({step: expected[step] for step in (3, 4)}, {step: found[step] for step in (3, 4)})


def compiled(rank: int, folder: str) -> tuple[str, History]:
    made = acceptance.trainer(
        folder, ["--tt_gbs", "4"], kind="llama", max_steps=1, torch_compile=True, torch_compile_backend="eager"
    )
    made.train()
    return type(made.model_wrapped).__name__, acceptance.history(made)


def test_a_sharded_model_is_compiled_where_that_is_asked_for(tmp_path: Path) -> None:
    """Trainer's own switch, which accelerate serves: the model is sharded already, and nobody shards it again."""
    plain = run_ranks(2, acceptance.run, str(tmp_path), ["--tt_gbs", "4"], "llama", None, {"max_steps": 1})

    for (kind, found), expected in zip(run_ranks(2, compiled, str(tmp_path)), plain, strict=True):
        assert kind == "OptimizedModule"
        assert_same(expected, found)


OWN_LOSSES: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "a loss function": {"own": "compute_loss_func"},
    "a term in compute_loss": {"own": "compute_loss"},
}


@pytest.mark.parametrize("changes", OWN_LOSSES.values(), ids=OWN_LOSSES)
def test_a_loss_past_the_engine_is_averaged_over_the_ranks(changes: dict[str, Any], tmp_path: Path) -> None:
    """What Trainer, or a subclass of it, computes of the logits counts as it does under DDP.

    Trainer shifts labels for the classes that it knows by name, and FSDP2 changes those.
    """
    changes = {"max_steps": 2, **changes}
    expected = run_ranks(1, stock_with, str(tmp_path), changes)[0]

    for found in run_ranks(2, acceptance.run, str(tmp_path), ["--tt_gbs", "4"], "llama", None, changes):
        assert_same(expected, found)


def stock_with(rank: int, folder: str, changes: dict[str, Any]) -> History:
    return acceptance.stock(Path(folder), "llama", **changes)


def wrapped(rank: int, folder: str) -> bool:
    made = acceptance.trainer(folder, ["--tt_gbs", "1"], kind="llama", max_steps=1)
    made.train()
    return made.model_wrapped is made.model


def test_nobody_wraps_the_model_of_a_launch_of_one_rank(tmp_path: Path) -> None:
    """torchrun with one process has a process group, for which Trainer would copy the gradients into DDP's buckets."""
    assert run_ranks(1, wrapped, str(tmp_path)) == [True]
