"""Plans of models with extra heads: bytes to the byte as two ranks hold them, and activations of a real micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_models
import mtp_models
import parity
import pytest
import torch
from ranks import run_ranks
from test_plan_bytes import storages

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.observe.tracker import TensorTracker
from torchturbo.plan import activations
from torchturbo.plan.memory import gradient_bytes, optimizer_bytes, parameter_bytes
from torchturbo.plan.model import settled_facts
from torchturbo.plan.optimizer import optimizer_of

MTP = {"mtp": {"enabled": True}}
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "two depths": ("deepseek_v3", MTP, None),
    "muon": ("glm4_moe", MTP, "muon"),
    "experts divided": ("glm4_moe", MTP | {"parallel_plan": {"ep_size": 2}}, "muon"),
    "weight 0": ("glm4_moe", {"mtp": {"enabled": True, "loss_scaling_factor": 0}}, None),
    "a draft": ("qwen3", MTP, "muon"),
}
"""Family, settings, and optimizer."""


def make(case: str) -> Any:
    kind = CASES[case][0]
    if kind == "qwen3":
        return draft_models.target(vocab_size=323)
    return mtp_models.model(kind, vocab_size=323, num_nextn_predict_layers=2 if kind == "deepseek_v3" else 1)


def real_bytes(rank: int, cases: list[str]) -> list[tuple[int, int, int]]:
    """Return what this rank holds of each case after an optimizer step: parameters, gradients, optimizer state."""
    from torchturbo.optim.groups import parameter_groups
    from torchturbo.optim.muon import MuonAdamW

    held = []
    for case in cases:
        _, settings, ours = CASES[case]
        model = make(case)
        engine = parity.prepared(model, parity.config(**settings), 2, rank)
        parity.step(engine, model, parity.share(parity.batches(2), 2, 1, rank))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained)
        if ours == "muon":
            optimizer = MuonAdamW(parameter_groups(model, 0.0, ()))
        optimizer.step()
        state = [tensor for one in optimizer.state.values() for tensor in one.values()]
        gradients = [parameter.grad for parameter in trained]
        held.append((storages(model.parameters()), storages(gradients), storages(state)))
    return held


def planned_bytes(case: str, rank: int) -> tuple[int, int, int]:
    _, settings, ours = CASES[case]
    with torch.device("meta"):
        model = make(case)
    config, context = parity.config(**settings), Context(world_size=2)
    Engine(config, context)
    facts = settled_facts(model, config, context)
    optimizer = optimizer_of(facts.weights, "adamw_torch", ours, facts.matrices)
    assert optimizer.rules is not None
    state = optimizer_bytes(facts.weights, optimizer.rules, rank)
    return parameter_bytes(facts.weights), gradient_bytes(facts.weights), state


@pytest.fixture(scope="module")
def held() -> dict[str, list[tuple[int, int, int]]]:
    """Return for each case what each rank really held."""
    ranks = run_ranks(2, real_bytes, list(CASES))
    return {case: [rank[at] for rank in ranks] for at, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_of_heads_what_was_planned(held: dict[str, list[tuple[int, int, int]]], case: str) -> None:
    """Byte for byte, padding included; heads of weight 0 have neither gradients nor state."""
    assert [planned_bytes(case, rank) for rank in range(2)] == held[case]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": MTP,
    "chunked": MTP | {"loss_chunk": {"enabled": True, "chunk_size": 64}},
    "recomputed": MTP | {"activation_checkpointing": {"enabled": True}},
    "weight 0": {"mtp": {"enabled": True, "loss_scaling_factor": 0}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_micro_batch_holds_about_what_was_estimated(name: str) -> None:
    """Two depths and their logits included, within a tenth."""
    settings, rows, length = parity.config(**SETTINGS[name]), 4, 64
    model = make("two depths")
    engine = parity.prepared(model, settings)
    ids = torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    tracker = TensorTracker(model)
    normaliser = engine.context.normaliser
    normaliser.open_window([batch], torch.device("cpu"))
    with tracker, normaliser.applied():
        loss = model(**batch).loss
        loss.backward()
        del loss
    tracker._settle((parameter.grad for parameter in model.parameters()), "gradients")
    found = max(moment.bytes["activations"] + moment.bytes["other"] for moment in tracker.moments())
    with torch.device("meta"):
        model = make("two depths")
    context = Context()
    Engine(settings, context)
    settled_facts(model, settings, context)
    estimate = activations.estimate(model, settings, context, rows, length)
    assert estimate.bytes is not None, estimate.reason
    assert estimate.bytes == pytest.approx(found, rel=0.1)


def test_what_a_draft_takes_is_not_counted_and_said(tmp_path: Path, plan: Callable[..., Any]) -> None:
    """Neither its blocks nor a verdict that rests on them."""
    make("a draft").save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    line = ["--world_size", 2, "--model", tmp_path / "model", "--memory", "80GiB"]
    for words, said in (
        ([], False),
        (["--tt_enable_mtp"], True),
        (["--tt_enable_mtp", "--tt_enable_dspark", "false"], False),
    ):
        text = plan(*line, *words).out
        assert said == ("not counted: the blocks of the DSpark draft" in " ".join(text.split())), text
        memory = plan(*line, *words, "--format", "json").json["memory"]
        assert (None if said else True) == memory["fits"]
        assert said == (memory["not_estimated"] == "the blocks of the DSpark draft")


def test_the_command_counts_heads(tmp_path: Path, plan: Callable[..., Any]) -> None:
    """With and without them, of the same folder."""
    model = make("two depths")
    model.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()  # the configuration alone is enough for a plan
    line = ["--world_size", 2, "--model", tmp_path / "model", "--format", "json"]
    without, with_heads = (plan(*line, *words).json["model"] for words in ([], ["--tt_enable_mtp"]))
    engine = parity.prepared(model, parity.config(**MTP))
    heads = sum(one.numel() for name, one in model.named_parameters() if name.startswith("mtp."))
    assert engine is not None and heads == with_heads["parameters"] - without["parameters"]
    assert with_heads["layers"] == without["layers"]
