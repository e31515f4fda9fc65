"""Objectives together, on meshes, in chunks, recomputed and accumulated: one process without any of it says the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import diffusing
import dspark_models
import mtp_models
import parity
import pytest
import torch
from ranks import run_ranks

Settings = dict[str, Any]
FAST: Settings = {"loss_chunk": {"enabled": True, "chunk_size": 8}, "activation_checkpointing": {"enabled": True}}
"""What the one process goes without."""
ROUTERS: Settings = {"moe": {"aux_loss_coeff": 0.05, "z_loss_coeff": 0.02}}


class Together(NamedTuple):
    """Objectives of one model."""

    settings: Settings
    metrics: set[str]


CASES = {
    "two depths of experts": Together(ROUTERS | {"mtp": {"enabled": True}}, {"mtp_1_loss", "mtp_2_loss", "moe_z_loss"}),
    "a draft": Together({"mtp": {"enabled": True}}, {"dspark_loss", "dspark_accept_rate_1"}),
    "blocks of experts": Together(ROUTERS | {"diffusion": {"cap_lambda": 2.0}}, {"cap_loss", "moe_aux_loss"}),
}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "2 data-parallel": (2, {}),
    "sp 2": (2, {"sp_size": 2}),
    "ep 2": (2, {"ep_size": 2}),
    "sp 2 x ep 2": (4, {"sp_size": 2, "ep_size": 2}),
}
RUNS = [(case, layout) for case in CASES for layout in LAYOUTS if case != "a draft" or "ep" not in layout]


def model(case: str) -> Any:
    """Return the model of a case."""
    if case == "a draft":
        return dspark_models.model()
    if case == "blocks of experts":
        return diffusing.model("qwen3_moe")
    return mtp_models.model("deepseek_v3", num_nextn_predict_layers=2)


def window(case: str, divisor: int) -> list[dict[str, Any]]:
    """Return four micro-batches with unequal numbers of targets, the last without any."""
    batches: list[dict[str, Any]] = parity.batches(4, vocabulary=mtp_models.VOCABULARY)
    if case != "blocks of experts":
        return batches
    noise = diffusing.noise(divisor=divisor)
    return [noise(batch, 0) for batch in batches]


def stepped(rank: int, case: str, world_size: int, plan: Settings, more: Settings) -> tuple[parity.Step, Any]:
    """Return one optimizer step of a rank, and its metrics."""
    torch.manual_seed(0)
    made, settings = model(case), parity.config(parallel_plan=plan, **CASES[case].settings, **more)
    engine = parity.prepared(made, settings, world_size, rank)
    torch.manual_seed(5)
    mine = parity.share(window(case, 2), world_size, settings.parallel_plan.sp_size, rank)
    found = parity.step(engine, made, mine)
    return found, engine.context.normaliser.term_metrics(1, torch.device("cpu"))


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_a_mesh_with_everything_on_equals_one_process(case: str, layout: str) -> None:
    """Loss, norm, every gradient, and what is logged."""
    world_size, plan = LAYOUTS[layout]
    expected, metrics = stepped(0, case, 1, {}, {})
    assert CASES[case].metrics <= metrics.keys()

    for found, logged in run_ranks(world_size, stepped, case, world_size, plan, FAST):
        parity.assert_equal(found, expected)
        assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-7)
