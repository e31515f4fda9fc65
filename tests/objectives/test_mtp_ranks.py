"""Multi-token prediction on several ranks: loss, metrics and every gradient are those of one process.

One process is held against loops over positions in test_mtp_math.py.
"""

from __future__ import annotations

from typing import Any

import mtp_models as tiny_mtp
import parity
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine

CPU = torch.device("cpu")
CHUNKED = {"loss_chunk": {"enabled": True, "chunk_size": 5}}


def window(packed: bool = False) -> list[dict[str, Tensor]]:
    """Return four micro-batches: unequally many targets in each, and none in the last; with documents or without."""
    made = [tiny_mtp.batch((11, 7), seed, masked=at) for at, seed in enumerate((1, 2, 3))]
    if packed:
        made = [tiny_mtp.packed((5, 6), (2, 9), seed=1), tiny_mtp.packed((11,), (3, 8), seed=2)]
        made.append(tiny_mtp.packed((1, 1, 9), (4, 7), seed=3))
    return [*made, made[0] | {"labels": torch.full_like(made[0]["labels"], -100)}]


def outcome(
    rank: int, world_size: int, kind: str, depths: int, packed: bool, settings: dict[str, Any]
) -> tuple[parity.Step, dict[str, float]]:
    """Return what a step of a prepared model gave, and what its depths would be logged as."""
    chosen = parity.config(**({"mtp": {"enabled": True, "loss_scaling_factor": 2.0}} | settings))
    model = tiny_mtp.model(kind, num_nextn_predict_layers=depths)
    engine = parity.prepared(model, chosen, world_size, rank)
    mine = parity.share(window(packed), world_size, chosen.parallel_plan.sp_size, rank)
    step = parity.step(engine, model, mine)
    return step, engine.context.normaliser.term_metrics(1, CPU)


def compared(rank: int, world_size: int, cases: list[tuple[str, int, bool, dict[str, Any]]]) -> None:
    """Hold each case on this rank against one process."""
    for kind, depths, packed, settings in cases:
        alone = {name: value for name, value in settings.items() if name not in ("parallel_plan", "moe")}
        found, metrics = outcome(rank, world_size, kind, depths, packed, settings)
        expected, logged = outcome(0, 1, kind, depths, packed, alone)
        parity.assert_equal(found, expected)
        assert logged == pytest.approx(metrics, rel=2e-6)
        assert sum(name.startswith("mtp.") for name in found.gradients) > 10 * depths


def test_two_ranks_that_shard_the_model_compute_what_one_does() -> None:
    """FSDP2, with unequally many targets a rank and a rank without one (NVIDIA/Megatron-LM#7452), two depths."""
    run_ranks(
        2,
        compared_on_two,
        [
            ("deepseek_v3", 2, False, {}),
            ("glm4_moe", 1, True, CHUNKED),
            ("deepseek_v3", 2, False, {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}),
            ("qwen3_next", 1, False, {"activation_checkpointing": {"enabled": True, "use_reentrant": False}}),
            ("glm4_moe", 1, False, {"freeze_policy": {"language_model": True}}),
        ],
    )


def test_two_ranks_that_share_sequences_compute_what_one_does() -> None:
    """Shifts are made before the split: targets and inputs go from one rank's part to the other's; also of documents."""
    shared = {"parallel_plan": {"sp_size": 2}}
    run_ranks(
        2,
        compared_on_two,
        [
            ("deepseek_v3", 2, False, shared),
            ("glm4_moe", 2, True, shared | CHUNKED),
            ("glm4_moe", 1, True, shared | {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}),
        ],
    )


def test_two_ranks_that_divide_experts_compute_what_one_does() -> None:
    """The heads' experts are divided, too."""
    divided = {"parallel_plan": {"ep_size": 2}}
    run_ranks(
        2,
        compared_on_two,
        [
            ("deepseek_v3", 2, False, divided),
            ("glm4_moe", 1, True, divided | {"activation_checkpointing": {"enabled": True, "use_reentrant": False}}),
        ],
    )


def compared_on_two(rank: int, cases: Any) -> None:
    compared(rank, 2, cases)


def in_bf16(rank: int) -> tuple[float, dict[str, float]]:
    """Return the loss of a sharded model that computes in bf16, and its depths' metrics."""
    step, metrics = outcome(rank, 2, "deepseek_v3", 2, False, {"mixed_precision": "bf16"} | CHUNKED)
    return step.loss, metrics


def test_sharded_heads_in_bf16_are_near_fp32() -> None:
    """Each unit is gathered in bf16, the heads' too."""
    expected, plain = outcome(0, 1, "deepseek_v3", 2, False, {"mixed_precision": "fp32"})

    for loss, metrics in run_ranks(2, in_bf16):
        assert expected.loss == pytest.approx(loss, rel=2e-2)
        assert plain == pytest.approx(metrics, rel=2e-2)


def weight_zero(rank: int) -> tuple[list[str], dict[str, float]]:
    """Return what AdamW moved of a sharded model whose heads have weight 0, and the metrics."""
    model = tiny_mtp.model()
    engine = parity.prepared(model, parity.config(mtp={"enabled": True, "loss_scaling_factor": 0}), 2, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    before = {name: parity.whole(value) for name, value in model.named_parameters()}
    parity.step(engine, model, parity.share(window(), 2, 1, rank))
    optimizer.step()
    moved = [name for name, value in model.named_parameters() if not torch.equal(parity.whole(value), before[name])]
    return moved, engine.context.normaliser.term_metrics(1, CPU)


def test_weight_zero_moves_nothing_of_sharded_heads() -> None:
    """All ranks run the heads for their losses, and gather what that takes."""
    (moved, metrics), (others, _) = run_ranks(2, weight_zero)

    assert moved == others
    assert "model.layers.0.mlp.up_proj.weight" in moved
    assert not [name for name in moved if name.startswith("mtp.")]
    assert metrics["mtp_1_loss"] > 1


def embedding_gradient(rank: int, world_size: int, sp_size: int) -> Tensor:
    """Return what the heads alone add to the gradient of the embeddings: all of it, less that of the main loss."""
    parts = []
    for weight in (1.0, 0.0):
        plan = {"parallel_plan": {"sp_size": sp_size}} if sp_size > 1 else {}
        settings = parity.config(mtp={"enabled": True, "loss_scaling_factor": weight}, **plan)
        model = tiny_mtp.model()
        engine = parity.prepared(model, settings, world_size, rank)
        step = parity.step(engine, model, window()[:1])
        parts.append(step.gradients["model.embed_tokens.weight"])
    return parts[0] - parts[1]


def two_ranks_share(rank: int) -> Tensor:
    return embedding_gradient(rank, 2, 2)


def test_what_the_heads_add_to_the_embeddings_does_not_shrink_with_the_ranks() -> None:
    """NVIDIA/Megatron-LM#3959: the heads' part was 1/n of what it should be where n ranks shared a sequence."""
    expected = embedding_gradient(0, 1, 1)

    for found in run_ranks(2, two_ranks_share):
        assert float((found - expected).norm() / expected.norm()) < 5e-6


def targets_of_two_ranks(rank: int) -> float:
    """Return the loss of depth 1 over both ranks, where one of them has two targets and the other eight."""
    model = tiny_mtp.model()
    engine = parity.prepared(model, parity.config(mtp={"enabled": True}), 2, rank)
    parity.step(engine, model, [(few(), many())[rank]])
    return engine.context.normaliser.term_metrics(1, CPU)["mtp_1_loss"]  # type: ignore[no-any-return]


def few() -> dict[str, Tensor]:
    return tiny_mtp.batch((12,), 1, masked=10)


def many() -> dict[str, Tensor]:
    return tiny_mtp.batch((12,), 2, masked=4)


def test_a_target_weighs_the_same_on_every_rank() -> None:
    """NVIDIA/Megatron-LM#7452: a mean of the ranks' means weighs the targets of a rank that has few of them more."""
    model = tiny_mtp.model()
    engine = parity.prepared(model, parity.config(mtp={"enabled": True}))
    sums, means = [], []
    for batch, targets in ((few(), 2), (many(), 8)):
        parity.step(engine, model, [batch])
        means.append(engine.context.normaliser.term_metrics(1, CPU)["mtp_1_loss"])
        sums.append(means[-1] * targets)

    found = run_ranks(2, targets_of_two_ranks)

    assert [sum(sums) / 10] * 2 == pytest.approx(found, rel=2e-6)
    assert abs(sum(means) / 2 - found[0]) > 1e-3


def each_family(rank: int, kinds: list[str]) -> dict[str, list[str]]:
    """Hold each family against one process on both kinds of mesh, and return where one of them is refused."""
    refused: dict[str, list[str]] = {}
    for kind in kinds:
        for size in ("sp_size", "ep_size"):
            settings = {"parallel_plan": {size: 2}}
            config = parity.config(mtp={"enabled": True}, **settings)
            if Engine(config, Context(world_size=2, rank=rank)).problems(tiny_mtp.model(kind)):
                refused.setdefault(size, []).append(kind)
            else:
                compared(rank, 2, [(kind, 1, False, settings)])
    return refused


@pytest.mark.full
def test_every_family_computes_on_two_ranks_what_it_does_on_one() -> None:
    """Whatever is not refused; layers that see the whole sequence elsewhere than in attention refuse to share it."""
    for refused in run_ranks(2, each_family, sorted(tiny_mtp.SETTINGS)):
        assert {
            "sp_size": ["deepseek_v32", "glm_moe_dsa", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"],
            "ep_size": ["qwen3_5_text"],
        } == refused


def compared_on_four(rank: int, cases: Any) -> None:
    compared(rank, 4, cases)


@pytest.mark.full
def test_four_ranks_that_do_it_all_compute_what_one_does() -> None:
    """Sequences shared by two ranks, experts divided over two or four, chunked loss and recomputation."""
    both = {"parallel_plan": {"sp_size": 2, "ep_size": 2}} | CHUNKED
    recomputed = {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}
    run_ranks(
        4,
        compared_on_four,
        [
            ("deepseek_v3", 2, False, both),
            ("glm4_moe", 2, True, both | recomputed),
            ("glm4_moe", 1, True, {"parallel_plan": {"sp_size": 2, "ep_size": 4}}),
        ],
    )
