"""The router losses on several ranks: however a window is spread and recomputed, what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import parity
import pytest
import router_oracle as oracle
import tiny
import torch
from ranks import run_ranks
from torch import Tensor

MOE = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.25}
GATES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
AGAIN, REENTRANT = {"enabled": True}, {"enabled": True, "use_reentrant": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2": (4, {}),
    "FSDP2, recomputed": (2, {"activation_checkpointing": AGAIN}),
    "FSDP2, recomputed reentrantly": (4, {"activation_checkpointing": REENTRANT}),
    "EP": (4, {"parallel_plan": {"ep_size": 2}}),
    "EP, recomputed reentrantly": (2, {"parallel_plan": {"ep_size": 2}, "activation_checkpointing": REENTRANT}),
    "SP": (2, {"parallel_plan": {"sp_size": 2}}),
    "SP of one": (1, {"parallel_plan": {"sp_size": 2}}),
    "SP, recomputed": (2, {"parallel_plan": {"sp_size": 2}, "activation_checkpointing": AGAIN}),
    "SP, recomputed reentrantly": (2, {"parallel_plan": {"sp_size": 2}, "activation_checkpointing": REENTRANT}),
    "SP and EP": (2, {"parallel_plan": {"sp_size": 2, "ep_size": 2}}),
    "SP, chunked loss": (2, {"parallel_plan": {"sp_size": 2}, "loss_chunk": {"enabled": True, "chunk_size": 7}}),
}
"""For each mesh of two ranks its number of micro-batches in the window, and its settings."""


def window(count: int, length: int = 13) -> list[dict[str, Tensor]]:
    """Return micro-batches of odd length, of which more and more is padding; the last has no target."""
    made = parity.batches(count, 2, length)
    for at, batch in enumerate(made):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, length - 2 * at - 1 :] = 0
        batch["attention_mask"][0, : 2 * at] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return made


@cache
def formula(count: int) -> parity.Step:
    """Return the step of one process, token by token."""
    found: parity.Step = oracle.step(
        oracle.Watched(tiny.model("qwen3_moe"), GATES, 2, "softmax"), window(count), 0.5, 0.25
    )
    return found


def hold(rank: int, world_size: int, cases: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Hold a step on each mesh against one process, and return what is logged."""
    logged = {}
    for name, (count, changes) in cases.items():
        try:
            model = tiny.model("qwen3_moe")
            settings = parity.config(moe=MOE, **changes)
            engine = parity.prepared(model, settings, world_size, rank)
            mine = parity.share(window(count), world_size, settings.parallel_plan.sp_size, rank)
            parity.assert_equal(parity.step(engine, model, mine), formula(count))
        except Exception as error:
            raise AssertionError(name) from error
        logged[name] = engine.context.normaliser.term_metrics(1, torch.device("cpu"))
    return logged


def alone(count: int) -> dict[str, float]:
    """Return what one process logs."""
    model = tiny.model("qwen3_moe")
    engine = parity.prepared(model, parity.config(moe=MOE))
    parity.step(engine, model, window(count))
    metrics: dict[str, float] = engine.context.normaliser.term_metrics(1, torch.device("cpu"))
    return metrics


def test_two_ranks() -> None:
    """Loss, norm, every gradient and both metrics."""
    for logged in run_ranks(2, hold, 2, CASES):
        assert CASES.keys() == logged.keys()
        for name, (count, _) in CASES.items():
            assert alone(count) == pytest.approx(logged[name], rel=1e-5), name


FOUR = {
    "SP 2": (2, {"parallel_plan": {"sp_size": 2}}),
    "SP 4": (1, {"parallel_plan": {"sp_size": 4}}),
    "SP and EP": (4, {"parallel_plan": {"sp_size": 2, "ep_size": 2}, "activation_checkpointing": AGAIN}),
    "EP 4": (4, {"parallel_plan": {"ep_size": 4}}),
    "SP and EP, recomputed reentrantly": (
        2,
        {"parallel_plan": {"sp_size": 2, "ep_size": 4}, "activation_checkpointing": REENTRANT},
    ),
}


@pytest.mark.full
def test_four_ranks() -> None:
    """The same coefficient has the same effect."""
    for logged in run_ranks(4, hold, 4, FOUR):
        for name, (count, _) in FOUR.items():
            assert alone(count) == pytest.approx(logged[name], rel=1e-5), name


def one_collective(rank: int) -> int:
    """Return how many collectives over the group of sequence parallelism the losses of all layers take."""
    import torch.distributed as dist

    from torchturbo.objectives import router_losses

    model = tiny.model("qwen3_moe", num_hidden_layers=4)
    engine = parity.prepared(model, parity.config(moe=MOE, parallel_plan={"sp_size": 2}), 2, rank)
    seen = []
    reduce = dist.all_reduce
    router_losses.dist.all_reduce = lambda *args, **kwargs: seen.append(kwargs.get("group")) or reduce(*args, **kwargs)
    try:
        parity.step(engine, model, window(1))
    finally:
        router_losses.dist.all_reduce = reduce
    return sum(group is engine.context.meshes.sp.get_group() for group in seen)


def test_all_layers_share_one_collective() -> None:
    """It comes after the forward."""
    assert run_ranks(2, one_collective) == [1, 1]


def own_loss(rank: int) -> None:
    """Hold a model whose own loss is on against one without, on a mesh that would refuse it."""
    for changes in ({"parallel_plan": {"sp_size": 2}}, {"activation_checkpointing": REENTRANT}):
        model = tiny.model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=9.0)
        settings = parity.config(moe=MOE, **changes)
        engine = parity.prepared(model, settings, 2, rank)
        mine = parity.share(window(2), 2, settings.parallel_plan.sp_size, rank)
        parity.assert_equal(parity.step(engine, model, mine), formula(2))


def test_a_model_with_a_loss_of_its_own() -> None:
    """It is replaced, so it is no reason against sequence parallelism or reentrant checkpointing."""
    run_ranks(2, own_loss)
