"""CPU offload in training: the numbers of a run without it, on one rank and on two; real placement on a CUDA device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch
from key_runs import rows
from ranks import run_ranks
from test_live_keys import Watcher
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.backends.fsdp2 import host_state
from torchturbo.engine.backends.fsdp2.host_state import HostStateOptimizer
from torchturbo.engine.backends.fsdp2.offload import offloaded
from torchturbo.engine.steps import mesh
from torchturbo.parallel.mesh import Meshes, MeshPlan
from torchturbo.runtime.cuda import CudaRuntime
from torchturbo.train.batches import Collator

MODES = ("all", "optimizer")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(mode: str, fraction: float = 0.5, **sections: Any) -> Any:
    offload: dict[str, Any] = {} if mode == "none" else {"enabled": True, "mode": mode}
    if mode == "optimizer":
        offload["optimizer_memory_fraction"] = fraction
    return parity.config(backend_config={"cpu_offload": offload}, **sections)


class Seen(Watcher):
    """Keeps the optimizer that plugins are shown."""

    def optimizer_built(self, optimizer: Any, run: Any) -> None:
        self.optimizer = optimizer


def trained(rank: int, folder: str, configs: list[Any]) -> list[tuple[dict[str, Any], list[dict[str, float]], str]]:
    """Train by each configuration; return the weights, the logs and the class of the optimizer."""
    return [_trained(folder, config) for config in configs]


def _trained(
    folder: str, config: Any, *, resume: str | None = None, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, float]], str]:
    watcher = Seen()
    settings: dict[str, Any] = {
        "max_steps": 3, "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5,
        "weight_decay": 0.1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3,
    }  # fmt: skip
    args = TrainingArguments(folder, **(settings | changes))
    trainer = TurboTrainer(
        model=tiny.model("qwen3_moe"),
        args=args,
        train_dataset=rows(16),
        data_collator=Collator(0),
        turbo_config=config,
        turbo_plugins=[watcher],
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: parity.whole(parameter) for name, parameter in trainer.model.named_parameters()}
    history = [{key: log[key] for key in ("loss", "grad_norm") if key in log} for log in trainer.state.log_history]
    return weights, history, type(watcher.optimizer).__name__


@pytest.mark.parametrize("name", [None, "muon"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_gives_the_numbers_of_one_without(world_size: int, name: str | None, tmp_path: Path) -> None:
    """Losses, clipped norms and weights: bit for bit where the state alone moves.

    One process that offloads everything is sharded, over itself; its numbers are those of one that is not.
    """
    optimizer = {"optimizer": {"name": name}} if name else {}
    configs = [config(mode, **optimizer) for mode in ("none", *MODES)]
    (plain, *others), *_ = run_ranks(world_size, trained, str(tmp_path), configs)
    for mode, (weights, logs, kind) in zip(MODES, others, strict=True):
        assert kind == ("HostState" if mode == "optimizer" else "") + plain[2]
        exact = mode == "optimizer" or world_size > 1
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(weights, plain[0], **tolerance)
        torch.testing.assert_close(logs, plain[1], **tolerance)


def resumed(rank: int, folder: str, pairs: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Train by one configuration, resume at the second step by another; return the weights of all runs."""
    found = []
    for at, (first, second) in enumerate(pairs):
        found.append(_trained(f"{folder}/{at}", first, save_strategy="steps", save_steps=2)[0])
        found.append(_trained(f"{folder}/{at}", second, resume=f"{folder}/{at}/checkpoint-2")[0])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_does_not_depend_on_it(world_size: int, tmp_path: Path) -> None:
    """Saved with or without, resumed without or with: every run ends as the others, bit for bit."""
    none, some = (config(mode, optimizer={"name": "muon"}) for mode in ("none", "optimizer"))
    (expected, *others), *_ = run_ranks(world_size, resumed, str(tmp_path), [(none, some), (some, none), (some, some)])

    assert len(others) == 5
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def own_groups(rank: int) -> list[tuple[bool, str]]:
    plan = MeshPlan(2, ep_size=2)
    default = torch.distributed.group.WORLD
    found = []
    for meshes in (Meshes.build(plan, "cpu"), Meshes.build(plan, "cpu", "cpu:gloo")):
        for one in (meshes.fsdp, meshes.ep):
            group = one.get_group()
            found.append((group is default, group._get_backend(torch.device("cpu")).name()))
    return found


def test_the_groups_of_parameters_can_have_backends_of_their_own() -> None:
    """Trainer makes the default group of a device with the device's backend alone."""
    for found in run_ranks(2, own_groups):
        assert {"gloo"} == {name for _, name in found}
        assert [True, True, False, False] == [default for default, _ in found]


def groups_of_an_engine(rank: int, settings: Any) -> list[bool]:
    asked: list[tuple[Any, str]] = []

    def backend(config: Any, runtime: Any) -> str:
        asked.append((config.backend_config.cpu_offload.mode, runtime.device_type))
        return "cpu:gloo"

    mesh.mesh_backend = backend  # type: ignore[assignment]
    engine = parity.prepared(tiny.model(), settings, 2, rank)
    assert asked == [("all", "cpu")]
    return [one.get_group() is torch.distributed.group.WORLD for one in (engine.context.meshes.fsdp,)]


def test_an_engine_asks_for_them() -> None:
    """By its configuration and its device."""
    assert [[False]] * 2 == run_ranks(2, groups_of_an_engine, config("all"))


# ---- on a device ----


def steps(config: Any, count: int = 2) -> tuple[Any, Any, list[float]]:
    """Train a model of some size on the device; return it with its optimizer, and the norms."""
    model = tiny.model("llama", hidden_size=256, intermediate_size=512)
    engine = parity.prepared(model if config.backend_config.cpu_offload.mode == "all" else model.cuda(), config)
    optimizer = offloaded(torch.optim.AdamW(model.parameters(), lr=1e-3), config, CudaRuntime())
    norms = []
    for seed in range(count):
        batch = {name: value.cuda() for name, value in parity.batches(1, seed=seed)[0].items()}
        norms.append(parity.step(engine, model, [batch]).norm)
        optimizer.step()
    return model, optimizer, norms


@gpu
@needs_gpu
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_the_state_is_off_the_device(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as were asked for, in page-locked memory, and the weights are those of the device alone."""
    monkeypatch.setattr(host_state, "BUCKET", 1 << 20)
    torch.cuda.empty_cache()
    plain, reference, _ = steps(config("none"))
    model, optimizer, _ = steps(config("optimizer", fraction))

    assert isinstance(optimizer, HostStateOptimizer)
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, actual)
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    in_host = [value for value in tensors if value.device.type == "cpu"]
    assert all(value.is_pinned() for value in in_host)
    assert sum(value.nbytes for value in in_host) / sum(value.nbytes for value in tensors) == pytest.approx(
        fraction, abs=0.02
    )


@gpu
@needs_gpu
def test_the_memory_is_free_between_steps() -> None:
    """What the allocator counts falls by the state's bytes."""
    held = {}
    for mode in ("none", "optimizer"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer, _ = steps(config(mode, 1.0))
        model.zero_grad()
        held[mode] = torch.cuda.memory_allocated() - before
        size = sum(parameter.nbytes for parameter in model.parameters())
        del model, optimizer

    assert held["none"] - held["optimizer"] == pytest.approx(2 * size, rel=0.1)


def everything(rank: int) -> None:
    model, optimizer, norms = steps(config("all"))
    plain, _, expected = steps(config("none"))
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=0)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.to_local().is_pinned()
        torch.testing.assert_close(parameter.to_local(), reference.cpu(), rtol=1e-4, atol=1e-5)
    assert {"cpu"} == {value.device.type for state in optimizer.state.values() for value in state.values()}


@gpu
@needs_gpu
def test_everything_is_off_the_device() -> None:
    """Parameters, gradients and state; gradients are clipped there, by a backend of the mesh's own."""
    run_ranks(1, everything)
