"""The estimate of activations against tensors that are really there, on one process and with shards on two ranks."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
import torch
from ranks import run_ranks

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.observe.tracker import TensorTracker
from torchturbo.plan import activations
from torchturbo.plan.memory import gradient_bytes, parameter_bytes
from torchturbo.plan.model import order_of, settled_facts
from torchturbo.plan.traffic import passing

TOLERANCE = 0.02
"""Of the estimate alone, for the same operators run."""
ROWS, LENGTH = 4, 64
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": {"enabled": True}}
CASES = {
    "plain": ("llama", {"num_hidden_layers": 4}, {}),
    "recomputed": ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}, CHECKPOINTED),
    "reentrant": ("qwen3", {}, {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}),
    "bf16": ("llama", {"num_hidden_layers": 4}, {"mixed_precision": "bf16"}),
    "chunked": ("llama", {"num_hidden_layers": 3}, {**CHECKPOINTED, "loss_chunk": {"enabled": True, "chunk_size": 64}}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 3}, {}),
    "two kinds of layers": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, CHECKPOINTED),
}


def measured(
    model: Any, settings: Any, rank: int = 0, world_size: int = 1, shape: tuple[int, int] = (ROWS, LENGTH)
) -> dict[str, int]:
    """Return the bytes by kind at the peak of one real micro-batch, forward and backward."""
    engine = parity.prepared(model, settings, world_size, rank)
    ids = torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(rank))  # evenly to all experts
    tracker = TensorTracker(model)
    with tracker:
        with engine.autocast():
            loss = model(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        del loss
    tracker._settle((parameter.grad for parameter in model.parameters()), "gradients")
    held = ("activations", "other")
    return max((moment.bytes for moment in tracker.moments()), key=lambda kinds: sum(kinds[kind] for kind in held))


@pytest.mark.parametrize("case", CASES)
def test_one_process_holds_what_was_estimated(case: str) -> None:
    """Within two per cent, whatever is recomputed, and however many layers are alike."""
    kind, changes, given = CASES[case]
    settings = parity.config(**given)
    found = measured(tiny.model(kind, **changes), settings)
    with torch.device("meta"):
        model = tiny.model(kind, **changes)
    context = Context()
    Engine(settings, context)
    settled_facts(model, settings, context)
    estimate = activations.estimate(model, settings, context, ROWS, LENGTH)
    assert estimate.bytes is not None, estimate.reason
    assert estimate.bytes == pytest.approx(found["activations"] + found["other"], rel=TOLERANCE)


def test_gradients_are_no_activations() -> None:
    """Those of few tokens are far smaller than the weights' own, which are held apart."""
    found = measured(tiny.model("qwen3_moe"), parity.config(), shape=(1, 4))
    with torch.device("meta"):
        model = tiny.model("qwen3_moe")
    estimate = activations.estimate(model, parity.config(), Context(), 1, 4)
    assert estimate.bytes == pytest.approx(found["activations"] + found["other"], rel=0.1)


def test_it_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that goes through its tokens one by one would take minutes."""
    monkeypatch.setattr(activations, "PATIENCE", 0)
    with torch.device("meta"):
        model = tiny.model("llama")
    assert (None, "TimeoutError: no end after 0 s") == activations.estimate(model, parity.config(), Context(), 1, 8)


SHARDED = [
    ("llama", {"num_hidden_layers": 6, "tie_word_embeddings": False}, CHECKPOINTED),
    ("qwen3_moe", {"num_hidden_layers": 6}, {"mixed_precision": "bf16", "parallel_plan": {"ep_size": 2}}),
]


def sharded_peaks(rank: int, world_size: int) -> list[dict[str, int]]:
    """Return the peak of each sharded case on this rank."""
    return [
        measured(tiny.model(kind, **changes), parity.config(**given), rank, world_size)
        for kind, changes, given in SHARDED
    ]


def test_a_sharded_rank_holds_about_what_was_planned() -> None:
    """State, activations, gathered units and gradients on their way: all tensors of a step on two ranks, within a tenth."""
    peaks = run_ranks(2, sharded_peaks, 2)
    for at, (kind, changes, given) in enumerate(SHARDED):
        settings = parity.config(**given)
        with torch.device("meta"):
            model = tiny.model(kind, **changes)
        context = Context(world_size=2)
        Engine(settings, context)
        facts = settled_facts(model, settings, context)
        lists = order_of(model, settings, context).lists
        bf16 = 2 if settings.mixed_precision == "bf16" else None
        held = passing(facts.weights, facts.layers, lists, itemsize=bf16, reshard=True)
        state = parameter_bytes(facts.weights) + gradient_bytes(facts.weights)
        estimate = activations.estimate(model, settings, context, ROWS, LENGTH).bytes
        assert estimate is not None
        planned = state + held.gathered + held.reducing + estimate
        for peak in peaks:
            assert planned == pytest.approx(sum(peak[at].values()), rel=0.1), kind


def test_a_model_that_needs_data_says_why() -> None:
    """It gets no number instead of a wrong one."""
    with torch.device("meta"):
        model = tiny.model("llama")
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: forward(hidden) * hidden.sum().item()
    found = activations.estimate(model, parity.config(), Context(), 1, 8)
    assert found.bytes is None and "DataDependent" in found.reason


def test_a_sequence_is_shared() -> None:
    """Two ranks that share a sequence hold about half of it each."""
    found = []
    for ranks in (1, 2):
        settings = parity.config(parallel_plan={"sp_size": ranks})
        context = Context(world_size=2)
        Engine(settings, context)
        with torch.device("meta"):
            model = tiny.model("llama")
        found.append(activations.estimate(model, settings, context, ROWS, LENGTH).bytes)
    assert found[0] is not None and found[1] == pytest.approx(found[0] / 2, rel=0.05)


def test_alike_layers_cost_no_time() -> None:
    """Only the first of each kind runs; the others hand their input on."""
    with torch.device("meta"):
        model = tiny.model("llama", num_hidden_layers=40)
    layers = list(model.model.layers)
    ran = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: ran.append(module))
    assert activations.estimate(model, parity.config(), Context(), 1, 8).bytes is not None
    assert [layers[0]] == ran
