"""One step of a model on several ranks beside the same step in one process: loss, gradient norm, every gradient."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TOLERANCE = 2e-6
"""Relative error of a loss or a gradient in fp32."""
NEAR_ZERO = 1e-7
"""Norm below which a gradient is noise, as a fraction of the norm of all of them."""

Batch = dict[str, Tensor]


class Step(NamedTuple):
    """What one optimizer step's forward and backward passes gave."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


def config(**settings: Any) -> Any:
    """Return a configuration: ``config(parallel_plan={"sp_size": 2})``; without activation checkpointing by default."""
    from torchturbo.engine.config import load_config

    settings = {"activation_checkpointing": {"enabled": False}, "ops": {"policy": "native"}} | settings
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "parity.json")
        file.write_text(json.dumps(settings))
        return load_config(file)


def batches(count: int, rows: int = 2, length: int = 16, vocabulary: int = 320, seed: int = 7) -> list[Batch]:
    """Return micro-batches of equal shape with ragged labels: unequally many targets in each, none in the last."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Batch] = []
    for at in range(count):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, : torch.randint(0, length, (), generator=generator)] = -100
        if at == count - 1 and count > 1:
            labels[:] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def whole(tensor: Any) -> Tensor:
    """Return a plain copy of a tensor that may be sharded. A collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def prepared(model: Any, settings: Any, world_size: int = 1, rank: int = 0) -> Any:
    """Return the engine that has prepared a model, in training mode, on this rank."""
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    engine = Engine(settings, Context(world_size=world_size, rank=rank))
    problems = engine.problems(model)
    assert not problems, problems
    engine.prepare(model.train())
    return engine


def step(engine: Any, model: Any, window: Sequence[Mapping[str, Tensor]]) -> Step:
    """Run one window of micro-batches through a prepared model, and gather what came of it. A collective."""
    import torch.distributed as dist

    from torchturbo.engine.backends.fsdp2.clip import clip_grad_norm

    model.zero_grad()
    normaliser = engine.context.normaliser
    copies = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in window
    ]
    device = copies[0]["input_ids"].device
    normaliser.open_window(copies, device)
    total = torch.zeros((), device=device)
    with normaliser.applied():
        for batch in copies:
            with engine.autocast():
                loss = model(**batch).loss
            loss.backward()
            total += loss.detach().float()
    if engine.context.world_size > 1:
        dist.all_reduce(total)
    norm = clip_grad_norm(model.parameters())
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Step(float(total), float(norm), gradients)


def reference(model: nn.Module, window: Sequence[Mapping[str, Tensor]]) -> Step:
    """Run a whole global batch through a plain model in one process, by the formula: summed loss over all targets."""
    model = copy.deepcopy(model).train()
    targets = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window)
    total = 0.0
    for batch in window:
        loss = model(**batch, num_items_in_batch=max(1, targets)).loss
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    return Step(total, float(norm), gradients)


def share(window: Sequence[Batch], world_size: int, sp_size: int, rank: int) -> list[Batch]:
    """Return the micro-batches of one rank: they go round the data-parallel ranks, as in Trainer."""
    dp_size = world_size // sp_size
    return list(window[rank // sp_size :: dp_size])


def errors(found: Step, expected: Step) -> dict[str, float]:
    """Return the relative error of loss, norm and every gradient."""
    floor = NEAR_ZERO * max(expected.norm, 1e-30)
    assert expected.gradients.keys() == found.gradients.keys()
    return {
        "loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12),
        "norm": abs(found.norm - expected.norm) / max(expected.norm, 1e-12),
    } | {
        name: float((found.gradients[name].cpu() - gradient.cpu()).norm() / gradient.cpu().norm().clamp(min=floor))
        for name, gradient in expected.gradients.items()
    }


def assert_equal(found: Step, expected: Step, tolerance: float = TOLERANCE) -> None:
    """Hold one step against another."""
    wrong = {name: error for name, error in errors(found, expected).items() if not error <= tolerance}
    assert not wrong, wrong


def check(
    rank: int,
    world_size: int,
    make: Callable[[], Any],
    settings: Any,
    window: Sequence[Batch],
    tolerance: float = TOLERANCE,
) -> None:
    """Hold one step of a prepared model on this rank against the plain model in one process. Call it on every rank."""
    model = make()
    expected = reference(model, window)
    engine = prepared(model, settings, world_size, rank)
    mine = share(window, world_size, settings.parallel_plan.sp_size, rank)
    assert_equal(step(engine, model, mine), expected, tolerance)
