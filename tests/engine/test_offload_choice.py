"""Which parameters' optimizer state is moved: as near to the fraction as can be, the same on every rank."""

from __future__ import annotations

from random import Random
from typing import Any

import launching
import parity
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from torchturbo.engine.backends.fsdp2.host_state import moves
from torchturbo.engine.backends.fsdp2.offload import check, choose, mesh_backend, offloaded, state_sizes
from torchturbo.engine.context import Context
from torchturbo.engine.pipeline import problems
from torchturbo.optim.groups import parameter_groups
from torchturbo.optim.muon import MuonAdamW
from torchturbo.runtime.cpu import CpuRuntime
from torchturbo.runtime.cuda import CudaRuntime

TENTHS = [tenth / 10 for tenth in range(11)]
MODELS = {kind: {n: 2 * p.nbytes for n, p in tiny.model(kind).named_parameters()} for kind in ("llama", "qwen3_moe")}


def test_small_cases() -> None:
    """Written out: the largest that fits first, then what comes nearer."""
    sizes = {"a": 50, "b": 30, "c": 15, "d": 5, "none": 0}

    assert {
        0: set(), 0.02: set(), 0.03: {"d"}, 0.5: {"a"}, 0.58: {"a", "d"}, 0.68: {"a", "c", "d"}, 0.8: {"a", "b"},
        0.99: {"a", "b", "c", "d"}, 1: {"a", "b", "c", "d"},
    } == {fraction: choose(sizes, fraction) for fraction in (0, 0.02, 0.03, 0.5, 0.58, 0.68, 0.8, 0.99, 1)}  # fmt: skip
    assert {"large"} == choose({"small": 1, "large": 4}, 0.75)
    assert {"a"} == choose({"b": 1, "a": 1, "c": 1}, 1 / 3)
    assert frozenset() == choose({}, 1)


@pytest.mark.parametrize("kind", MODELS)
def test_each_tenth_is_within_one_parameter(kind: str) -> None:
    """Of its target; and no two of them are alike.

    DeepSpeed's ratio knew two settings only (https://github.com/deepspeedai/DeepSpeed/issues/4775).
    """
    sizes, total = MODELS[kind], sum(MODELS[kind].values())
    moved = [sum(sizes[name] for name in choose(sizes, fraction)) for fraction in TENTHS]

    assert all(abs(got / total - fraction) < 0.01 for got, fraction in zip(moved, TENTHS, strict=True))
    assert max(sizes.values()) / total > 0.05
    assert sorted(set(moved)) == moved
    assert (0, total) == (moved[0], moved[-1])


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**12)), st.floats(0, 1), st.randoms())
def test_no_single_parameter_would_come_nearer(sizes: dict[str, int], fraction: float, random: Random) -> None:
    """Whatever the sizes, added or taken out; and in any order of the mapping the choice is the same."""
    chosen = choose(sizes, fraction)
    gap = fraction * sum(sizes.values()) - sum(sizes[name] for name in chosen)
    shuffled = list(sizes.items())
    random.shuffle(shuffled)

    for name, size in sizes.items():
        assert abs(gap + (size if name in chosen else -size)) >= abs(gap) * (1 - 1e-9) - 1e-3
    assert chosen == choose(dict(shuffled), fraction)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(p for p in model.parameters() if p.requires_grad),
    "torch's muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
    "centered rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "muon": lambda model: MuonAdamW(parameter_groups(model, 0.0, ())),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sizes_are_those_of_the_state(name: str) -> None:
    """Known before there is a state, and equal to it once there is: a frozen parameter has none."""
    model = tiny.model("qwen3_moe")
    model.model.norm.weight.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model)
    sizes = state_sizes(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()

    real = [
        sum(value.nbytes for value in optimizer.state.get(parameter, {}).values() if moves(value))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert real == list(sizes.values())


def shards(rank: int, settings: Any) -> tuple[dict[str, int], int, int]:
    model = tiny.model("qwen3_moe", hidden_size=36, vocab_size=323)  # vocabulary and norms do not divide by two
    parity.prepared(model, settings, 2, rank)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = state_sizes(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [
        state for parameter in model.parameters() for state in optimizer.state[parameter].values() if moves(state)
    ]
    return sizes, sum(state.to_local().nbytes for state in states), sum(state.nbytes for state in states)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_ranks_count_alike_what_they_hold_unequally(
    ep_size: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger share of what does not divide: or one would choose what the other does not, and a collective hangs."""
    monkeypatch.chdir(tmp_path)
    settings = parity.config(parallel_plan={"ep_size": ep_size}, moe={"token_dispatcher": "alltoall"})

    (first, held_first, whole), (second, held_second, _) = run_ranks(2, shards, settings)

    assert first == second
    assert held_first + held_second == whole
    assert sum(first.values()) == max(held_first, held_second) > min(held_first, held_second)


def configured(**offload: Any) -> Any:
    return parity.config(backend_config={"cpu_offload": {"enabled": True, **offload}})


class Device(CpuRuntime):
    """A device that is not the host."""

    device_type = "cuda"
    distributed_backend = "nccl"


def test_the_log_says_what_was_reached(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes and as a fraction, beside the one asked for."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.ParameterList([torch.zeros(600, 512), torch.zeros(300, 512), torch.zeros(124, 512)])
    config = configured(mode="optimizer", optimizer_memory_fraction=0.6)
    with launching.said() as lines:
        offloaded(torch.optim.AdamW(model), config, Device())

    assert [
        "cpu_offload: optimizer state of 1 of 3 parameters in host memory, 2.34 of 4.00 MiB a rank: 0.5859, asked for 0.6"
    ] == lines


def test_the_log_says_where_the_count_is_an_estimate(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that nobody knows is counted as Adam; each that is known is not said to be."""
    monkeypatch.chdir(tmp_path)
    Unknown = type("Unknown", (torch.optim.Optimizer,), {})
    config = configured(mode="optimizer", optimizer_memory_fraction=0.5)
    with launching.said() as lines:
        offloaded(Unknown([torch.zeros(4)], {}), config, Device())
        offloaded(torch.optim.RMSprop([torch.zeros(4)]), config, Device())

    assert [True, False] == [line.endswith("; estimated: Unknown is counted as Adam") for line in lines]


@pytest.mark.parametrize("mode", ["all", "optimizer"])
def test_on_a_cpu_it_says_that_nothing_moves(mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that does nothing is not accepted in silence."""
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    with launching.said() as lines:
        assert offloaded(optimizer, configured(mode=mode), CpuRuntime()) is optimizer

    key = "backend_config.cpu_offload.enabled"
    assert f"{key}: the device is the CPU, whose memory is the host's: nothing moves" == lines[0]
    assert (type(optimizer) is torch.optim.AdamW) == (mode == "all")


def test_off_it_leaves_an_optimizer_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other keys say."""
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.AdamW([torch.zeros(1)])

    assert offloaded(optimizer, configured(enabled=False, mode="optimizer"), Device()) is optimizer
    assert type(optimizer) is torch.optim.AdamW


def test_gradients_in_host_memory_need_a_backend_there(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the state offloaded on an accelerator: clipping reduces where the gradients are."""
    monkeypatch.chdir(tmp_path)
    everything, state_only = configured(mode="all"), configured(mode="optimizer")

    assert "cpu:gloo,cuda:nccl" == mesh_backend(everything, CudaRuntime())
    assert (None, None) == (mesh_backend(everything, CpuRuntime()), mesh_backend(state_only, CudaRuntime()))
    assert [] == check(None, everything, Context(CudaRuntime()))
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert [] == check(None, state_only, Context(CudaRuntime()))
    (problem,) = [one for one in problems(tiny.model(), everything, Context(CudaRuntime())) if "cpu_offload" in one.key]
    assert "parity.json:1:" in problem.place
    assert "built without; install a torch with gloo, or set" in str(problem)
