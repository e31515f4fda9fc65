"""Agreement: what is wrong on one rank ends all of them, with its message, and nobody waits."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest
import tiny
from ranks import run_ranks

from torchturbo.errors import ConfigError, Problem
from torchturbo.parallel.agree import together


def checked(rank: int, kind: str) -> tuple[str, str]:
    """Fail on rank 1, or everywhere, or nowhere; return what was raised and printed."""
    caught = io.StringIO()
    with contextlib.redirect_stderr(caught):
        try:
            with together("reading the dataset"):
                if kind == "both" or (kind == "config" and rank == 1):
                    raise ConfigError([Problem("rows.jsonl:3", "", "no JSON"), Problem("--dataset", "", "gone")])
                if kind == "crash" and rank == 1:
                    raise MemoryError("8 GiB")
        except (ConfigError, MemoryError) as error:
            return type(error).__name__, caught.getvalue()
    return "", caught.getvalue()


def test_a_problem_of_one_rank_names_it() -> None:
    """The other raises it too; the node's first rank prints it, once."""
    first, second = run_ranks(2, checked, "config")

    assert first == ("ConfigError", "error: rows.jsonl:3: no JSON (rank 1)\nerror: --dataset: gone (rank 1)\n")
    assert second == ("ConfigError", "")


def test_a_problem_of_all_ranks_is_said_once() -> None:
    """Without a rank."""
    first, second = run_ranks(2, checked, "both")

    assert first == ("ConfigError", "error: rows.jsonl:3: no JSON\nerror: --dataset: gone\n")
    assert second == ("ConfigError", "")


def test_an_unexpected_error_keeps_its_type_where_it_happened() -> None:
    """The others stop with its words instead of waiting."""
    first, second = run_ranks(2, checked, "crash")

    assert first == ("ConfigError", "error: reading the dataset failed: MemoryError: 8 GiB (rank 1)\n")
    assert second == ("MemoryError", "")


def test_nothing_wrong_costs_nothing() -> None:
    """And one process asks nobody."""
    assert run_ranks(2, checked, "none") == [("", ""), ("", "")]
    with pytest.raises(ConfigError), together("x"):
        raise ConfigError([Problem("a", "", "b")])


def started(rank: int, folder: str) -> tuple[int, str]:
    """Start a run whose rows are missing on rank 1, as with a disk that is local to a node."""
    from torchturbo.cli.train import run

    rows = "rows.jsonl" if rank == 0 else "elsewhere.jsonl"
    words = [
        "--model_name_or_path", f"{folder}/model", "--dataset", f"{folder}/{rows}", "--output_dir", f"{folder}/out",
        "--use_cpu", "--max_steps", "1",
    ]  # fmt: skip
    caught = io.StringIO()
    with contextlib.redirect_stderr(caught):
        status = run(words)
    return status, caught.getvalue()


def test_a_run_whose_rows_are_missing_on_one_rank(tmp_path: Path) -> None:
    """Both ranks end with status 2, at once."""
    tiny.save(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(4))
    before = time.monotonic()

    (first, printed), (second, silent) = run_ranks(2, started, str(tmp_path))

    assert (first, second) == (2, 2)
    assert "there is no file" in printed
    assert "(rank 1)" in printed
    assert silent == ""
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - before < 60


def test_a_block_inside_another_prints_its_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It is every rank's already, and the blocks around it hand it on."""
    with pytest.raises(ConfigError), together("outside"), together("inside"):
        raise ConfigError([Problem("here", "", "is wrong")])
    assert "error: here: is wrong\n" == capsys.readouterr().err
