"""Muon's state in distributed checkpoints: saved on one mesh, loaded on another, and the learning rate with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import muon_models
import torch
import torch.distributed.checkpoint as dcp
from muon_models import Case, give, gradients, optimizer, sharded, weights, whole, worst
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
CASE = Case("qwen3_moe", ep=2)


def made(world_size: int, case: Case) -> tuple[nn.Module, nn.Module, Any, Any]:
    """Return a plain model for gradients, the sharded one, its optimizer, and a schedule that halves the rate each step."""
    plain = muon_models.model(case.kind)
    model = sharded(plain, case, world_size)
    stepper = optimizer(model)
    return plain, model, stepper, LambdaLR(stepper, lambda step: 0.5**step)


def go_on(plain: nn.Module, model: nn.Module, stepper: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        give(model, gradients(plain, step))
        stepper.step()
        schedule.step()


def save(rank: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after two steps; return the weights after four, and the momenta as they were saved."""
    plain, model, stepper, schedule = made(2, CASE)
    go_on(plain, model, stepper, schedule, range(2))
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, stepper, options=FLAT)}
    state["schedule"] = schedule.state_dict()
    dcp.save(state, checkpoint_id=folder)
    momenta = {name: whole(value) for name, value in state["optim"].items() if name.endswith("momentum_buffer")}
    go_on(plain, model, stepper, schedule, range(2, 4))
    return weights(model), momenta


def resume(
    rank: int, world_size: int, case: Case, folder: Path
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Load into fresh objects and take two more steps; return weights, the groups' rates after loading, the momenta."""
    plain, model, stepper, schedule = made(world_size, case)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, stepper, options=FLAT)}
    state["schedule"] = schedule.state_dict()
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, stepper, state["optim"], options=FLAT)
    schedule.load_state_dict(state["schedule"])
    rates = [group["lr"] for group in stepper.param_groups]
    assert all(group["initial_lr"] == muon_models.LR for group in stepper.param_groups)
    loaded = get_optimizer_state_dict(model, stepper, options=FLAT)
    momenta = {name: whole(value) for name, value in loaded.items() if name.endswith("momentum_buffer")}
    go_on(plain, model, stepper, schedule, range(2, 4))
    return weights(model), rates, momenta


def test_a_saved_optimizer_goes_on_on_any_mesh(tmp_path: Path) -> None:
    """Bit for bit on the same mesh, within rounding on another, at the rate that the schedule had reached."""
    expected, saved = run_ranks(2, save, tmp_path)[0]

    for world_size, case in ((2, CASE), (1, Case("qwen3_moe")), (4, Case("qwen3_moe", ep=4))):
        for found, rates, momenta in run_ranks(world_size, resume, world_size, case, tmp_path):
            assert {muon_models.LR / 4} == set(rates)
            assert saved.keys() == momenta.keys() and 12 == len(saved)
            assert all(torch.equal(saved[name], momenta[name]) for name in saved)
            if case == CASE:
                assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
            assert worst(found, expected) < 1e-6


def fresh(rank: int) -> tuple[dict[str, list[int]], float]:
    """Return what a state dict of an optimizer that never stepped holds, and how far making it moved the weights."""
    _, model, stepper, _ = made(2, CASE)
    before = weights(model)
    state = get_optimizer_state_dict(model, stepper, options=FLAT)
    kept = {name: list(value.shape) for name, value in state.items() if name.startswith("state.")}
    return kept, worst(weights(model), before)


def test_a_fresh_optimizer_has_a_place_for_all_that_is_loaded() -> None:
    """DCP takes a step with gradients of zero to get it, which moves nothing."""
    for kept, moved in run_ranks(2, fresh):
        names = [name for name, _ in muon_models.model("qwen3_moe").named_parameters()]
        muon = [name for name in names if f"state.{name}.momentum_buffer" in kept]
        assert 12 == len(muon)
        assert all(f"state.{name}.exp_avg" in kept for name in names if name not in muon)
        assert 0 == moved
