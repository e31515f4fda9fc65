"""The bytes that a plan gives for parameters, gradients and optimizer state are those of a real run on four ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import parity
import pytest
import tiny
import tiny_vlm
import torch
from ranks import run_ranks

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.plan.memory import gradient_bytes, optimizer_bytes, parameter_bytes
from torchturbo.plan.model import settled_facts
from torchturbo.plan.optimizer import optimizer_of

UNEVEN = {"vocab_size": 323, "hidden_size": 30, "intermediate_size": 50, "head_dim": 6}
"""Sizes that four ranks do not divide."""


class Case(NamedTuple):
    """A model and how it is trained."""

    name: str
    kind: str
    changes: dict[str, Any]
    settings: dict[str, Any]
    ours: str | None = None


CASES = [
    Case("tied, uneven", "qwen3", {**UNEVEN, "tie_word_embeddings": True}, {}),
    Case("untied", "llama", {"tie_word_embeddings": False}, {"mixed_precision": "bf16"}),
    Case("untied, muon, uneven", "qwen3", {**UNEVEN, "tie_word_embeddings": False}, {}, "muon"),
    Case("experts", "qwen3_moe", {"num_experts": 6, "vocab_size": 321}, {}),
    Case("few experts", "mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, {}),
    Case("expert parallel", "qwen3_moe", {"moe_intermediate_size": 28}, {"parallel_plan": {"ep_size": 2}}),
    Case(
        "expert parallel, muon",
        "qwen3_moe",
        {"vocab_size": 321},
        {"parallel_plan": {"ep_size": 2, "sp_size": 2}},
        "muon",
    ),
    Case("one set of experts a rank", "qwen3_moe", {}, {"parallel_plan": {"ep_size": 4}}),
]


def storages(tensors: Any) -> int:
    """Return the bytes of what tensors lie in, each once; of a sharded tensor what this rank has."""
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        found[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(found.values())


def real_bytes(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, int, int]]:
    """Return what this rank holds of each case after an optimizer step: parameters, gradients, optimizer state."""
    from torchturbo.optim.groups import parameter_groups
    from torchturbo.optim.muon import MuonAdamW

    held = []
    for case in cases:
        model = tiny.model(case.kind, **case.changes)
        model.lm_head.weight.requires_grad_(case.changes.get("tie_word_embeddings", True))  # one that is frozen, too
        settings = parity.config(**case.settings)
        engine = parity.prepared(model, settings, world_size, rank)
        window = parity.share(parity.batches(world_size), world_size, settings.parallel_plan.sp_size, rank)
        engine.context.normaliser.open_window([dict(batch) for batch in window], torch.device("cpu"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained)
        if case.ours == "muon":
            optimizer = MuonAdamW(parameter_groups(model, 0.0, ()))
        with engine.context.normaliser.applied():
            for batch in window:
                model(**batch).loss.backward()
        optimizer.step()
        state = [tensor for one in optimizer.state.values() for tensor in one.values()]
        gradients = [parameter.grad for parameter in trained]
        held.append((storages(model.parameters()), storages(gradients), storages(state)))
    return held


def planned_bytes(case: Case, world_size: int, rank: int) -> tuple[int, int, int]:
    """Return the same by the plan's arithmetic, from a model without weights."""
    with torch.device("meta"):
        model = tiny.model(case.kind, **case.changes)
    model.lm_head.weight.requires_grad_(case.changes.get("tie_word_embeddings", True))
    config = parity.config(**case.settings)
    context = Context(world_size=world_size)
    Engine(config, context)
    facts = settled_facts(model, config, context)
    optimizer = optimizer_of(facts.weights, "adamw_torch", case.ours, facts.matrices)
    assert optimizer.rules is not None
    return (
        parameter_bytes(facts.weights),
        gradient_bytes(facts.weights),
        optimizer_bytes(facts.weights, optimizer.rules, rank),
    )


@pytest.fixture(scope="module")
def held() -> list[list[tuple[int, int, int]]]:
    """Return for each rank what it really held of each case."""
    return run_ranks(4, real_bytes, 4, CASES)


@pytest.mark.parametrize("at", range(len(CASES)), ids=[case.name for case in CASES])
def test_every_rank_holds_what_was_planned(held: list[list[tuple[int, int, int]]], at: int) -> None:
    """Byte for byte, padding included, with one part of the model frozen."""
    planned = [planned_bytes(CASES[at], 4, rank) for rank in range(4)]
    assert planned == [held[rank][at] for rank in range(4)]


def test_the_cases_are_uneven(held: list[list[tuple[int, int, int]]]) -> None:
    """Some rank holds less optimizer state than another; else the arithmetic of padding would not be seen."""
    assert any(held[0][at][2] != held[3][at][2] for at in range(len(CASES)))


def test_one_process_holds_everything() -> None:
    """Without sharding there is nothing to pad: whole parameters, gradients and moments."""
    case = CASES[0]
    model = tiny.model(case.kind, **case.changes)
    numel = sum(parameter.numel() for parameter in model.parameters())
    tensors = sum(1 for _ in model.parameters())
    assert planned_bytes(case, 1, 0) == (4 * numel, 4 * numel, 8 * numel + 4 * tensors)


def test_what_is_frozen_has_no_gradient() -> None:
    """By the run's own freeze policy."""
    found = {}
    for precision in ("fp32", "bf16"):
        config = parity.config(freeze_policy={"vision_tower": True}, mixed_precision=precision)
        model = tiny_vlm.model("llava")
        frozen = sum(p.numel() for name, p in model.named_parameters() if "vision_tower" in name)
        context = Context(world_size=2)
        Engine(config, context)
        facts = settled_facts(model.to("meta"), config, context)
        assert frozen == facts.parameters - facts.trained > 0
        found[precision] = parameter_bytes(facts.weights)
        assert gradient_bytes(facts.weights) == sum(4 * weight.padded for weight in facts.weights if weight.trained)
    assert found["fp32"] == found["bf16"]  # the command reads every weight in fp32
