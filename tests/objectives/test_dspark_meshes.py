"""A draft trained on several ranks, with accumulation, checkpointing and chunked loss: equal to one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import dspark_models
import parity
import pytest
import torch
from ranks import run_ranks

CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": {"enabled": True}}
REENTRANT: dict[str, Any] = {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}
CHUNKED: dict[str, Any] = {"loss_chunk": {"enabled": True, "chunk_size": 5}}
UNEVEN = {"num_attention_heads": 3, "num_key_value_heads": 1}
"""A draft attends to whole rows on every rank: its heads need not divide."""
SMOOTH: dict[str, Any] = {"initializer_range": 0.05}
"""Weights with which float32 keeps the target's own small gradients to 2e-6."""
FROZEN: dict[str, Any] = {"freeze_policy": {"language_model": True}}


def window(kind: str) -> list[parity.Batch]:
    """Return four micro-batches with unequally many slots; the last has no anchor, and nor has rank 1 of two."""
    if kind == "packed":
        return dspark_models.packed(4, length=15)
    made = parity.batches(4, length=15)
    made[1]["labels"][:] = -100
    made[1]["labels"][0, 3] = 5  # a target of the main loss that is no anchor
    return made


def metrics(engine: Any) -> dict[str, float]:
    found: dict[str, float] = engine.context.normaliser.term_metrics(1, torch.device("cpu"))
    return found


def alone(settings: dict[str, Any], kind: str, changes: dict[str, Any]) -> tuple[parity.Step, dict[str, float]]:
    """Return one process's step, and its metrics."""
    model = dspark_models.model(**SMOOTH | changes)
    engine = parity.prepared(model, dspark_models.settings(**settings))
    return parity.step(engine, model, window(kind)), metrics(engine)


def on_ranks(rank: int, world_size: int, cases: list[tuple[dict[str, Any], str, dict[str, Any]]]) -> None:
    """Hold every case against one process, which computes without checkpointing and chunks, and in one window."""
    for settings, kind, changes in cases:
        kept = {name: value for name, value in settings.items() if name in ("freeze_policy", "dspark")}
        expected, logged = alone(kept, kind, changes)
        model = dspark_models.model(**SMOOTH | changes)
        engine = parity.prepared(model, dspark_models.settings(**settings), world_size, rank)
        sp_size = settings.get("parallel_plan", {}).get("sp_size", 1)
        found = parity.step(engine, model, parity.share(window(kind), world_size, sp_size, rank))
        parity.assert_equal(found, expected)
        assert logged == pytest.approx(metrics(engine), rel=1e-5)
        assert any(name.startswith("mtp.markov") for name in found.gradients)


def shared(size: int) -> dict[str, Any]:
    return {"parallel_plan": {"sp_size": size}}


def test_two_ranks() -> None:
    """FSDP2 and sequence parallelism; rank 1 has no anchor in either of its micro-batches under FSDP2 alone."""
    cases = [
        ({}, "plain", {}),
        (CHECKPOINTED | CHUNKED, "packed", {"kind": "llama"}),
        (REENTRANT | FROZEN, "plain", {"tie_word_embeddings": True}),
        (shared(2), "plain", {"tie_word_embeddings": True, "spec": UNEVEN}),
        (shared(2) | REENTRANT | CHUNKED, "packed", {}),
    ]
    run_ranks(2, on_ranks, 2, cases)


@pytest.mark.full
def test_four_ranks() -> None:
    cases = [
        (shared(2) | CHECKPOINTED, "packed", {}),
        (shared(4) | CHUNKED, "plain", {"num_key_value_heads": 4}),
        (REENTRANT | shared(2), "plain", {"tie_word_embeddings": True}),
    ]
    run_ranks(4, on_ranks, 4, cases)


@pytest.mark.parametrize("settings", [CHECKPOINTED, REENTRANT, CHUNKED, CHECKPOINTED | CHUNKED], ids=["kept", "reentrant", "chunked", "both"])  # fmt: skip
def test_one_process(settings: dict[str, Any]) -> None:
    expected, logged = alone({}, "packed", {})
    found, same = alone(settings, "packed", {})

    parity.assert_equal(found, expected)
    assert logged == pytest.approx(same, rel=1e-5)


def test_accumulation_is_one_window() -> None:
    """Micro-batches one by one are one batch of all their rows, and a loss of the mean of their means is not."""
    batches = parity.batches(2)
    joined = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
    model = dspark_models.model()
    steps = []
    for one, micro_batches in ((model, batches), (copy.deepcopy(model), joined)):
        engine = parity.prepared(one, dspark_models.settings())
        steps.append(parity.step(engine, one, micro_batches))
    parity.assert_equal(*steps)


def test_weight_and_value_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ones in every step and with every seed, whatever the random state is when they are counted and computed."""
    from torchturbo.objectives.dspark import objective as module

    seen: list[Any] = []

    def drawn(*args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        blocks = plain(*args, **kwargs)
        seen.append(blocks.anchors.tolist())
        return blocks

    plain = module.draw_blocks
    monkeypatch.setattr(module, "draw_blocks", drawn)
    model, batches = dspark_models.model(), dspark_models.packed(2)
    engine = parity.prepared(model, dspark_models.settings())
    engine.context.hooks.run = run = RunStub()
    for seed, steps in ((7, (0, 1)), (8, (1,))):
        run.trainer = SimpleNamespace(args=SimpleNamespace(seed=seed))
        engine.prepare(model)
        for step in steps:
            run.step = step
            parity.step(engine, model, batches)
    drawn_in = [seen[:4], seen[4:8], seen[8:]]
    assert [True] * 3 == [one[:2] == one[2:] for one in drawn_in]
    assert drawn_in[0] != drawn_in[1] != drawn_in[2]


class RunStub:
    """As much of a run as is asked for."""

    step = 0
    model: Any = None
    trainer: Any = None
