"""An optimizer with its state in host memory: bit-equal results, bounded moves, and everything else as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import parity
import pytest
import tiny
import torch
from accelerate import Accelerator
from offloading import Device
from ranks import run_ranks
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchturbo.engine.backends.fsdp2 import host_state
from torchturbo.engine.backends.fsdp2.host_state import HostStateOptimizer, moves
from torchturbo.engine.backends.fsdp2.offload import offloaded
from torchturbo.optim.groups import layouts, parameter_groups
from torchturbo.optim.muon import MuonAdamW

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(model: Any, **options: Any) -> Optimizer:
    """Return AdamW with two groups, as Trainer makes it."""
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, **options)


def muon(model: Any) -> Optimizer:
    names = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    return MuonAdamW(parameter_groups(model, 0.1, names), lr=1e-2, layouts=layouts(model))


class Counting(SGD):
    """Counts its steps in the group, as schedule-free optimizers do, and lets the count matter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in (one for one in group["params"] if one.grad is not None):
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["count"])
                self.state[parameter]["momentum_buffer"] = parameter.grad.clone()


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": adamw,
    "foreach": lambda model: adamw(model, foreach=True),
    "fused": lambda model: adamw(model, fused=True),
    "amsgrad": lambda model: adamw(model, amsgrad=True),
    "one by one": lambda model: adamw(model, foreach=False),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "muon": muon,
    "counting": lambda model: Counting(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _small_buckets(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_state, "BUCKET", 20_000)


def config(fraction: float = 1.0, **others: Any) -> Any:
    offload = {"enabled": True, "mode": "optimizer", "optimizer_memory_fraction": fraction}
    return parity.config(backend_config={"cpu_offload": offload}, **others)


def train(model: Any, optimizer: Optimizer, steps: int = 3, seed: int = 0) -> None:
    """Train on gradients that are random numbers; every other step one parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    scheduler = LambdaLR(optimizer, lambda at: 0.5**at)
    for at in range(steps):
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if at % 2 and number == 3 else gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def assert_same(expected: Any, actual: Any) -> None:
    """Hold weights or state dicts against each other, bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def states(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if moves(value)]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_and_state_are_bit_equal(name: str, fraction: float) -> None:
    """To those without offload; the device's copy is overwritten when it has gone back, and the host's meanwhile."""
    plain = tiny.model("qwen3_moe")
    model = copy.deepcopy(plain)
    reference, device = MAKERS[name](plain), Device()
    optimizer = offloaded(MAKERS[name](model), config(fraction), device)
    train(plain, reference)
    train(model, optimizer)

    assert_same(plain.state_dict(), model.state_dict())
    assert_same(reference.state_dict(), optimizer.state_dict())
    assert isinstance(optimizer, type(reference))
    in_host = sum(value.nbytes for value in states(optimizer) if device.is_host(value))
    total = sum(value.nbytes for value in states(optimizer))
    assert in_host / total == pytest.approx(fraction, abs=0.01)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_comes_to_the_device_in_buckets(name: str) -> None:
    """Never more than a bucket at once, or one parameter that is larger; in the first step too, which makes it."""
    model, device = tiny.model("qwen3_moe"), Device()
    optimizer = offloaded(MAKERS[name](model), config(), device)
    assert [] == device.moves
    train(model, optimizer, steps=1)
    assert {"host"} == {to for to, _ in device.moves}
    device.moves.clear()
    train(model, optimizer, steps=1)

    total, bucket = sum(value.nbytes for value in states(optimizer)), host_state.BUCKET
    largest = max(sum(value.nbytes for value in state.values() if moves(value)) for state in optimizer.state.values())
    assert device.peak() <= max(bucket, largest) < total / 3
    assert len(device.runs()) > 6
    for to in ("device", "host"):
        assert total == sum(size for where, size in device.moves if where == to)
    assert device.synchronized  # the host reads what the last copies bring


def test_only_those_that_live_there_move() -> None:
    """The others are stepped where they are, all at once."""
    model, device = tiny.model("llama"), Device()
    optimizer = offloaded(adamw(model), config(0.3), device)
    train(model, optimizer, steps=2)

    stayed = [value for value in states(optimizer) if not device.is_host(value)]
    assert stayed
    assert sum(size for to, size in device.moves if to == "device") == sum(
        value.nbytes for value in states(optimizer) if device.is_host(value)
    )


def test_what_has_no_gradient_stays() -> None:
    """Nothing is done with its state, so nothing is moved for it."""
    model, device = tiny.model("llama"), Device()
    optimizer = offloaded(adamw(model), config(), device)
    train(model, optimizer, steps=1)
    device.moves.clear()
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    optimizer.step()

    assert [("device", 128)] * 2 + [("host", 128)] * 2 == device.moves


def test_host_memory_is_used_again() -> None:
    """Page-locked memory is dear to get: the state goes back to where it came from."""
    model = tiny.model("llama")
    optimizer = offloaded(adamw(model), config(), Device())
    train(model, optimizer, steps=1)
    before = [value.data_ptr() for value in states(optimizer)]
    train(model, optimizer, steps=2)

    assert before == [value.data_ptr() for value in states(optimizer)]


def test_a_failed_step_leaves_the_state_in_host_memory() -> None:
    """And the groups whole."""
    model, device = tiny.model("llama"), Device()
    optimizer = offloaded(adamw(model), config(), device)
    train(model, optimizer, steps=1)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()

    assert all(device.is_host(value) for value in states(optimizer))
    assert groups == [list(group["params"]) for group in optimizer.param_groups]


def test_hooks_and_closures_run_once_a_step() -> None:
    """However many buckets it has: plugins of others count on it."""
    model = tiny.model("llama")
    optimizer = offloaded(adamw(model), config(), Device())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append(f"closure {torch.is_grad_enabled()}")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return 7.0

    assert 7.0 == optimizer.step(closure)
    assert ["before", "closure True", "after"] == calls
    assert all(optimizer.state[parameter] for parameter in model.parameters())


def test_a_scheduler_that_was_there_before() -> None:
    """Trainer takes an optimizer and its scheduler as they are, and a scheduler patches the step it finds."""
    plain = tiny.model("llama")
    model = copy.deepcopy(plain)
    reference, optimizer, device = adamw(plain), adamw(model), Device()
    schedulers = [LambdaLR(one, lambda at: 0.5**at) for one in (reference, optimizer)]
    offloaded(optimizer, config(), device)
    for one, its in ((plain, reference), (model, optimizer)):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
        its.step()
    with warnings.catch_warnings():  # a scheduler complains of a step that it did not see, or that is not its patch
        warnings.simplefilter("error")
        for scheduler in schedulers:
            scheduler.step()
    assert_same(plain.state_dict(), model.state_dict())
    assert device.moves


def grads(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("name", ["adamw", "fused", "muon"])
def test_a_loaded_state_goes_to_host_memory(name: str) -> None:
    """Without having been on the device, and the next steps are those of the run that it comes from."""
    plain = tiny.model("llama")
    model = copy.deepcopy(plain)
    reference, device = MAKERS[name](plain), Device()
    train(plain, reference)
    model.load_state_dict(plain.state_dict())
    optimizer = offloaded(MAKERS[name](model), config(0.5), device)
    saved = copy.deepcopy(reference.state_dict())
    optimizer.load_state_dict(saved)

    assert {"host"} == {to for to, _ in device.moves}
    assert_same(reference.state_dict(), optimizer.state_dict())
    assert_same(saved, reference.state_dict())  # nobody else's copy was touched
    in_host = sum(value.nbytes for value in states(optimizer) if device.is_host(value))
    assert in_host / sum(value.nbytes for value in states(optimizer)) == pytest.approx(0.5, abs=0.01)
    train(plain, reference, seed=1)
    train(model, optimizer, seed=1)
    assert_same(plain.state_dict(), model.state_dict())


def test_a_loaded_state_takes_the_parameters_format() -> None:
    """As torch's own loading does; counts keep theirs."""
    model = tiny.model("llama").double()
    saved = AdamW(tiny.model("llama").parameters())
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    optimizer = offloaded(AdamW(model.parameters()), config(), Device())
    optimizer.load_state_dict(saved.state_dict())

    assert {torch.float64} == {value.dtype for value in states(optimizer)}
    assert {torch.float32} == {state["step"].dtype for state in optimizer.state.values()}


def test_a_state_that_is_there_moves_at_once() -> None:
    """An optimizer may have been stepped before."""
    model, device = tiny.model("llama"), Device()
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    offloaded(optimizer, config(), device)

    assert all(device.is_host(value) for value in states(optimizer))
    assert offloaded(optimizer, config(), device) is optimizer
    assert 1 == sum(kind is HostStateOptimizer for kind in type(optimizer).__mro__)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_torchs_distributed_checkpoints_save_and_load_it(name: str) -> None:
    """``get_optimizer_state_dict`` steps a fresh optimizer to make it a state, then its tensors are loaded."""
    plain = tiny.model("llama")
    model = copy.deepcopy(plain)
    reference, device = MAKERS[name](plain), Device()
    train(plain, reference)
    model.load_state_dict(plain.state_dict())
    optimizer = offloaded(MAKERS[name](model), config(), device)
    assert get_optimizer_state_dict(model, optimizer, options=FLAT)
    set_optimizer_state_dict(
        model, optimizer, copy.deepcopy(get_optimizer_state_dict(plain, reference, options=FLAT)), options=FLAT
    )

    assert_same(plain.state_dict(), model.state_dict())
    assert all(device.is_host(value) for value in states(optimizer))
    assert_same(reference.state_dict()["state"], optimizer.state_dict()["state"])
    for one, its in ((plain, reference), (model, optimizer)):
        grads(one)
        its.step()
    assert_same(plain.state_dict(), model.state_dict())


def test_accelerate_prepares_it() -> None:
    """Its wrapper loads the state back that it has just read, and steps through ours."""
    plain = tiny.model("llama")
    model = copy.deepcopy(plain)
    reference, device = adamw(plain), Device()
    inner = offloaded(adamw(model), config(), device)
    train(plain, reference)
    train(model, inner)
    optimizer = Accelerator(cpu=True).prepare(inner)
    assert all(device.is_host(value) for value in states(inner))
    for one, its in ((plain, reference), (model, optimizer)):
        grads(one)
        its.step()

    assert_same(plain.state_dict(), model.state_dict())
    assert not optimizer.step_was_skipped


def test_a_copy_is_an_optimizer_like_any_other() -> None:
    """It knows of no host memory."""
    model = tiny.model("llama")
    optimizer = offloaded(adamw(model), config(), Device())
    train(model, optimizer, steps=1)
    model, copied = copy.deepcopy((model, optimizer))
    grads(model)
    copied.step()

    assert isinstance(copied, HostStateOptimizer)
    assert not copied._sizes


# ---- sharded ----


def sharded(rank: int, settings: Any, name: str) -> None:
    """Hold two steps with offload against two without, and a resumed third, on this rank; all bit for bit."""
    made = []
    for offload in (False, True):
        model = tiny.model("qwen3_moe", hidden_size=36)
        engine = parity.prepared(model, settings, 2, rank)
        optimizer, device = MAKERS[name](model), Device()
        if offload:
            offloaded(optimizer, settings, device)
        for seed in range(2):
            parity.step(engine, model, parity.batches(2, seed=seed)[rank : rank + 1])
            optimizer.step()
        made.append((engine, model, optimizer, device))
    (_, plain, reference, _), (engine, model, optimizer, device) = made
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(expected.to_local(), actual.to_local())
        for key, value in reference.state[expected].items():
            mine = optimizer.state[actual][key]
            assert_same(parity.whole(value), parity.whole(mine))
            assert not moves(mine) or mine.placements == value.placements
    in_host = [device.is_host(value) for value in states(optimizer)]
    assert 0 < sum(in_host) < len(in_host)
    _resumed(made[0], made[1], MAKERS[name], settings, rank)


def _resumed(one: Any, other: Any, make: Any, settings: Any, rank: int) -> None:
    (engine, plain, reference, _), (other_engine, model, optimizer, _) = one, other
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
    device = Device()
    model.zero_grad()  # as in a fresh process
    fresh = offloaded(make(model), settings, device)
    set_optimizer_state_dict(model, fresh, saved, options=FLAT)
    for runs, trained, its in ((engine, plain, reference), (other_engine, model, fresh)):
        parity.step(runs, trained, parity.batches(2, seed=5)[rank : rank + 1])
        its.step()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(expected.to_local(), actual.to_local())
    assert any(device.is_host(value) for value in states(fresh))


@pytest.mark.parametrize(("name", "ep_size"), [("adamw", 1), ("adamw", 2), ("muon", 2)])
def test_sharded_states_keep_their_placements(name: str, ep_size: int) -> None:
    """Local tensors move; with experts on a mesh of their own, and after a resume from a distributed state dict."""
    settings = config(0.5, parallel_plan={"ep_size": ep_size}, moe={"token_dispatcher": "alltoall"})

    run_ranks(2, sharded, settings, name)
