"""DeepSeek-V4's heads on two ranks, recomputed, in chunks and in parts, beside one process that does none of it."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import v4
from ranks import run_ranks

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.steps.heads import KEPT

TOLERANCE = 1e-9

MTP: dict[str, Any] = {"mtp": {"enabled": True, "loss_scaling_factor": 0.5}}
DSPARK: dict[str, Any] = {"mtp": {"enabled": True}, "dspark": {"num_anchors": 4, "loss_scaling_factor": 0.5}}
SERIAL: dict[str, Any] = {"num_nextn_predict_layers": 2}
AGAIN, REENTRANT = {"enabled": True}, {"enabled": True, "use_reentrant": True}
CHUNKS = {"enabled": True, "chunk_size": 5}
WHOLE = "in one micro-batch"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    WHOLE: (1, {}),
    "recomputed": (1, {"activation_checkpointing": AGAIN}),
    "recomputed, reentrant": (1, {"activation_checkpointing": REENTRANT}),
    "in chunks": (1, {"loss_chunk": CHUNKS}),
    "sharded": (2, {}),
    "sharded, recomputed, in chunks": (2, {"activation_checkpointing": AGAIN, "loss_chunk": CHUNKS}),
    "experts divided, recomputed": (2, {"parallel_plan": {"ep_size": 2}, "activation_checkpointing": REENTRANT}),
}

SHARED: dict[str, tuple[int, dict[str, Any]]] = {
    "sequences shared": (2, {"parallel_plan": {"sp_size": 2}}),
    "sequences shared, in chunks": (2, {"parallel_plan": {"sp_size": 2}, "loss_chunk": CHUNKS}),
}


def made(changes: dict[str, Any], objective: dict[str, Any]) -> Any:
    """Return a model that has got its heads already, with numbers under which they weigh."""
    model = v4.double(v4.model(**changes))
    parity.prepared(model, parity.config(**objective)).release(model)
    v4.stir(KEPT[model], 3)
    return model.train()


def window() -> list[dict[str, Any]]:
    """Return four micro-batches with unequally many targets, the last without any."""
    batches = [v4.batch(2, 10, prompt, seed) for seed, prompt in ((5, 2), (6, 6), (7, 4), (8, 10))]
    batches[0]["position_ids"] = torch.tensor([[*range(7), *range(3)], [*range(4), *range(6)]])
    for batch in batches[1:]:
        batch["position_ids"] = torch.arange(10).expand(2, -1)
    return batches


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def hold(rank: int, changes: dict[str, Any], objective: dict[str, Any], cases: dict[str, Any]) -> None:
    """Hold each case against one process, all in float64: some gradients of the streams' weights are small sums."""
    with pytest.MonkeyPatch.context() as patch, v4.in_double(patch):
        model = made(changes, objective)
        expected = parity.step(parity.prepared(model, parity.config(**objective)), model, window())
        missing = {name for name, _ in model.named_parameters()} - expected.gradients.keys()
        assert all(".indexer." in name for name in missing), missing  # which chooses, and has no gradient
        for at, (name, (ranks, settings)) in enumerate(cases.items()):
            if ranks == 1 and at % 2 != rank:  # the other rank's
                continue
            model = made(changes, objective)
            config = parity.config(**objective, **settings)
            engine = parity.prepared(model, config, ranks, rank % ranks)
            share = parity.share(window(), ranks, config.parallel_plan.sp_size, rank % ranks)
            share = [joined(share)] if name == WHOLE else share
            errors = parity.errors(parity.step(engine, model, share), expected)
            assert errors.pop("loss") <= parity.TOLERANCE, name  # which is added up in float32
            assert {} == {name: error for name, error in errors.items() if not error <= TOLERANCE}, name


def test_serial_heads_are_the_same_however_they_are_computed() -> None:
    """Loss, norm and every gradient: recomputed in both ways, in chunks, sharded, with divided experts, in micro-batches."""
    run_ranks(2, hold, SERIAL, MTP, CASES)


def test_stages_are_the_same_however_they_are_computed() -> None:
    """The same for DSpark: also the anchors are those of one process."""
    run_ranks(2, hold, v4.DSPARK, DSPARK, CASES)


def test_ranks_share_sequences_where_the_model_lets_them() -> None:
    """A model whose layers attend in a window alone, as its heads do. Those that compress keys are refused for it."""
    window_alone = {"layer_types": ["sliding_attention"] * 3}
    run_ranks(2, hold, SERIAL | window_alone, MTP, SHARED)
    run_ranks(2, hold, v4.DSPARK | window_alone, DSPARK, SHARED)
    with torch.device("meta"):
        model = v4.model(**SERIAL)
    context = Context(world_size=2)
    problems = Engine(parity.config(**MTP, parallel_plan={"sp_size": 2}), context).problems(model)

    assert {"parallel_plan.sp_size"} == {problem.key for problem in problems}
    reason = "chooses among the tokens of a part of the sequence only"
    kinds = ("CSACompressor", "Indexer", "IndexerScorer", "HCACompressor")
    assert [f"DeepseekV4{kind} {reason}" for kind in kinds] == [problem.message for problem in problems]
