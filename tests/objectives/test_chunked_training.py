"""Chunked loss in a training step: the normaliser's formula on any layout, with chunks below it, in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_normalise import assert_equal, oracle, ragged_rows, trained_step
from torch import Tensor

from torchturbo.engine import args
from torchturbo.objectives import chunked

ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def chunked_step(
    rank: int, kind: str, rows: Any, folder: str, gbs: int, changes: dict[str, Any], size: int, recompute: bool
) -> tuple[tuple[float, dict[str, Tensor]], int]:
    """Run one optimizer step with chunks; return loss, gradients, and how many losses the head computed itself."""
    words = ["--tt_enable_chunk_loss", "--tt_loss_chunk_size", str(size)]
    parse = args.parse_torchturbo_args
    args.parse_torchturbo_args = lambda argv: parse([*argv, *words])  # this process is the test's own
    computed = 0
    plain = chunked.ChunkedHead.loss

    def loss(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal computed
        computed += not self.turbo_chunking.trial
        return plain(self, *args, **kwargs)

    chunked.ChunkedHead.loss = loss  # type: ignore[method-assign]
    if recompute:
        chunked.needs_recomputing = lambda *args: True
    return trained_step(rank, kind, rows, folder, gbs, changes), computed


CASES = [
    pytest.param("llama", 1, 3, set(), {}, 5, id="one process, accumulated"),
    pytest.param("llama", 2, 2, set(), {}, 5, id="two ranks, accumulated, unequal tokens"),
    pytest.param("llama", 2, 2, set(), {"tie_word_embeddings": True}, 1024, id="tied"),
    pytest.param("llama", 2, 2, {2, 3, 6, 7}, {}, 5, id="a rank without a target"),
    pytest.param("llama", 2, 1, {0, 1, 2, 3}, {}, 5, id="no target anywhere"),
    pytest.param("gemma2", 2, 2, set(), {"final_logit_softcapping": 0.2}, 5, id="soft-capping"),
    pytest.param("mixtral", 2, 2, set(), ROUTER, 5, id="a router's loss"),
]


@pytest.mark.parametrize("recompute", [False, True], ids=["gradient in forward", "recompute"])
@pytest.mark.parametrize(("kind", "world", "accumulation", "masked", "changes", "size"), CASES)
def test_one_step_equals_the_formula_on_any_layout(
    kind: str,
    world: int,
    accumulation: int,
    masked: set[int],
    changes: dict[str, Any],
    size: int,
    recompute: bool,
    tmp_path: Path,
) -> None:
    """Loss and every gradient are those of one process over all tokens without chunks."""
    rows = ragged_rows(2 * world * accumulation, masked)
    expected = oracle(kind, rows, 2, **changes)

    results = run_ranks(world, chunked_step, kind, rows, str(tmp_path), world * accumulation, changes, size, recompute)

    for result, computed in results:
        assert_equal(expected, result)
        assert accumulation == computed


def test_a_run_in_chunks_is_the_run_without(tmp_path: Path) -> None:
    """Through the trainer on both sides."""
    rows = ragged_rows(6)
    (plain,) = run_ranks(1, trained_step, "llama", rows, str(tmp_path), 3, {})

    ((result, _),) = run_ranks(1, chunked_step, "llama", rows, str(tmp_path), 3, {}, 5, False)

    assert_equal(plain, result)


def evaluated(rank: int, rows: Any, folder: str) -> float:
    """Evaluate with chunks on, and see that no chunk was computed."""
    import tiny
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
    from torchturbo.train.examples import Examples

    set_torchturbo_args(parse_torchturbo_args(["--tt_enable_chunk_loss"] if rank >= 0 and folder else [])[0])
    args = TrainingArguments(folder or "unused", per_device_eval_batch_size=2, use_cpu=True, report_to="none")
    trainer = TurboTrainer(model=tiny.model(), args=args, eval_dataset=Examples(rows))
    assert isinstance(trainer.model, chunked.ChunkedModel) == bool(folder)
    return float(trainer.evaluate()["eval_loss"])


def test_evaluation_is_bit_identical(tmp_path: Path) -> None:
    """It takes the plain path."""
    rows = ragged_rows(5)

    assert run_ranks(1, evaluated, rows, "") == run_ranks(1, evaluated, rows, str(tmp_path))
