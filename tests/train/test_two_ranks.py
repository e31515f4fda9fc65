"""The same run on two ranks: the losses, weights and files of one process, also after a resume, and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(24))
    return folder


def command(material: str, output: str, *words: str) -> list[str]:
    return [
        "--model_name_or_path", f"{material}/model", "--dataset", f"{material}/rows.jsonl", "--output_dir", output,
        "--use_cpu", "--max_steps", "4", "--learning_rate", "5e-3", "--per_device_train_batch_size", "2",
        "--tt_gbs", "4", *words,
    ]  # fmt: skip


def run_one(rank: int, words: list[str], seed_by_rank: bool = False) -> dict[str, Any]:
    from torchturbo.train.run import train

    result = train(words, quiet=True)
    history = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in result.log_history if "loss" in entry}
    return {"history": history, "accumulation": result.trainer.args.gradient_accumulation_steps}


def assert_close(expected: dict[int, Any], actual: dict[int, Any]) -> None:
    assert expected.keys() == actual.keys()
    for step, (loss, norm) in expected.items():
        assert actual[step] == pytest.approx((loss, norm), rel=1e-5), step


@pytest.mark.parametrize("words", [[], ["--packing", "--cutoff_len", "99"]], ids=["padded", "packed"])
def test_two_ranks_train_as_one(words: list[str], material: Path, tmp_path: Path) -> None:
    """gbs 4 is accumulation 4 on one rank and 2 on two; each step sees the same rows."""
    (one,) = run_ranks(1, run_one, command(str(material), str(tmp_path / "one"), *words))
    two = run_ranks(2, run_one, command(str(material), str(tmp_path / "two"), *words))

    assert (one["accumulation"], two[0]["accumulation"]) == (4, 2)
    for rank in two:
        assert_close(one["history"], rank["history"])
    from safetensors.torch import load_file

    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=2e-4)  # four steps of Adam


def test_rows_that_do_not_fill_the_last_round_count_once(material: Path, tmp_path: Path) -> None:
    """accelerate fills it up with rows from the start; their targets count in no mean."""
    rows = tiny.write_jsonl(tmp_path / "five.jsonl", tiny.rows(5))
    words = ["--dataset", str(rows), "--per_device_train_batch_size", "1", "--tt_gbs", "2", "--max_steps", "-1"]
    words += ["--num_train_epochs", "1", "--logging_steps", "1"]
    (one,) = run_ranks(1, run_one, command(str(material), str(tmp_path / "one"), *words))
    two = run_ranks(2, run_one, command(str(material), str(tmp_path / "two"), *words))

    for rank in two:
        assert_close(one["history"], rank["history"])


def test_a_resume_on_two_ranks_is_bit_equal_and_on_one_the_same(material: Path, tmp_path: Path) -> None:
    """gbs makes the same steps of other ranks and accumulation, so nothing has to be allowed."""
    words = command(str(material), str(tmp_path / "out"), "--save_steps", "2", "--logging_steps", "1")
    whole = run_ranks(2, run_one, words)
    resume = [*words, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2")]
    again = [*resume, "--output_dir", str(tmp_path / "again")]
    rest = run_ranks(2, run_one, again)
    (one,) = run_ranks(1, run_one, [*again, "--output_dir", str(tmp_path / "one")])

    assert rest[0]["history"] == whole[0]["history"]
    assert (one["accumulation"], rest[0]["accumulation"]) == (4, 2)
    assert whole[0]["history"].keys() == one["history"].keys()
    for step, values in whole[0]["history"].items():
        assert one["history"][step] == pytest.approx(values, rel=1e-6 if step <= 3 else 1e-5), step


def test_torchrun(material: Path, tmp_path: Path) -> None:
    """The command of the guide, which does not speak of the CPU, on two CPU ranks: one banner, one progress, one model."""
    words = [word for word in command(str(material), str(tmp_path / "out")) if word != "--use_cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "torchturbo", "train", *words],
        capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count("micro-batch 2 x accumulation 2 x data-parallel ranks 2 = 8 sequences per step, 4 steps") == 1
    )
    assert "backend fsdp2: 2 ranks = dp 2 x sp 1" in done.stderr
    assert done.stderr.count("step 4/4") == 1
    record = json.loads((tmp_path / "out" / "torchturbo_run.json").read_text())
    assert (record["run"]["world_size"], record["step"]) == (2, 4)
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"]]
    assert losses[-1] < losses[0]
    assert {path.name for path in (tmp_path / "out" / "checkpoint-4").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }


def test_a_batch_that_does_not_divide(material: Path, tmp_path: Path) -> None:
    """One line for the node, all factors in it, nothing written."""
    words = [*command(str(material), str(tmp_path / "out")), "--tt_gbs", "3"]

    first, second = run_ranks(2, refused, words)

    assert first == (
        2,
        "error: --tt_gbs: gbs: accumulation = gbs * sp_size / world_size = 3 * 1 / 2 = 1.5 is no whole number of steps;"
        " use 2 or 4 (a multiple of the 2 data-parallel ranks), or another number of ranks\n",
    )
    assert second == (2, "")
    assert not (tmp_path / "out").exists()


def refused(rank: int, words: list[str]) -> tuple[int, str]:
    import contextlib
    import io

    from torchturbo.cli.train import run

    caught = io.StringIO()
    with contextlib.redirect_stderr(caught):
        return run(words), caught.getvalue()
