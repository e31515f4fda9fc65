"""Saving as the engine does it against ``torch.distributed.checkpoint.save`` of the same model and AdamW, on two ranks.

Both write the same tensors, each rank its own shards. What the engine adds are checks of its own: plain values in
``optimizer.json`` instead of pickles, one answer for all ranks. Beside it stands what training waits for: during a run
a checkpoint is copied to host memory and written in the background, so the copy is the pause.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_pairs import Side, Turns
from engine_steps import make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchturbo.checkpoint import native

RANKS = 2
OURS, PAUSE, DCP = "torchturbo save", "torchturbo save, pause of training", "dcp.save"

Saves = Callable[[Any, torch.optim.Optimizer, Path], None]


def whole() -> tuple[Side, Side]:
    """Return a whole save by the engine and by DCP."""
    return Side(OURS, save_ours, RANKS, {}), Side(DCP, save_dcp, RANKS, {})


def pause() -> tuple[Side, Side]:
    """Return the part of a save that training waits for, and a save by DCP."""
    return Side(PAUSE, save_pause, RANKS, {}), Side(DCP, save_dcp, RANKS, {})


def save_ours(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Save by the engine until the files are there."""
    group = dist.new_group(backend="gloo")  # as in a run, where another thread writes

    def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        native.save(native.capture(model, optimizer), folder, group)

    _repeat(turns, settings, save)


def save_pause(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Take the copy that the engine then writes in the background."""

    def copy(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        native.snapshot(native.capture(model, optimizer))

    _repeat(turns, settings, copy)


def save_dcp(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Save by DCP alone."""

    def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.save(state, checkpoint_id=folder)

    _repeat(turns, settings, save)


def _repeat(turns: Turns, settings: dict[str, Any], save: Saves) -> None:
    """Save a sharded model that has taken a step, each time into a new folder, which goes after the turn."""
    model: Any = make_model(settings["device"]).to(settings["device"])
    mesh = init_device_mesh(settings["device"], (settings["ranks"],))
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(1, 8, dtype=torch.long, device=settings["device"])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    more, at = True, 0
    while more:
        folder = Path(settings["folder"], f"save-{at}")
        folder.mkdir(exist_ok=True)
        turns.begin()
        save(model, optimizer, folder)
        more = turns.end()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        at += 1
