"""The exact state of a run in the folder ``native/`` of a checkpoint: torch.distributed.checkpoint, tensors alone.

Each rank writes its own shards (``__R_0.distcp``), and a resumed run reads what its shards need of them, whatever the
mesh it was saved on. Names are ``model.WEIGHT`` and ``optim.state.WEIGHT.STATE``. What is no tensor, learning rates for
example, stands in ``optimizer.json``: DCP would pickle it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchturbo.checkpoint.names import model_tensors
from torchturbo.checkpoint.optimizer_state import (
    collect,
    empty_states,
    give,
    names_for,
    put,
    read_options,
    write_options,
)
from torchturbo.checkpoint.safe_metadata import read_index
from torchturbo.checkpoint.transfer import from_first, quiet, read_into, staged, write
from torchturbo.engine.backends.fsdp2.shard import reshard
from torchturbo.errors import some


@dataclass
class State:
    """What is saved: tensors by DCP's two-level names, and the optimizer's options; None saves the model alone."""

    tensors: dict[str, dict[str, Tensor]]
    options: dict[str, Any] | None = None


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """Return the state of a run as it stands; its tensors are the run's own, not copies.

    Raises
    ------
    ValueError
        If there is something in it that is neither a tensor nor a plain value.

    """
    tensors = {"model": model_tensors(model)}
    if optimizer is None:
        return State(tensors)
    states, options = collect(model, optimizer)
    return State(tensors | {"optim": states}, options)


def snapshot(state: State) -> State:
    """Return a copy of a state in host memory: training may go on."""
    return State(staged(state.tensors), state.options)


def save(state: State, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a state into a folder, before this returns. A collective on ``group``; None is one process.

    Raises
    ------
    OSError
        If a rank could not; the message names the rank.

    """
    with quiet():
        write(state.tensors, folder, group)
    if state.options is not None and (group is None or dist.get_rank(group) == 0):
        write_options(state.options, folder)


def load_model(model: nn.Module, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Load a checkpoint's weights into a model, in place. A collective on ``group``; None is one process.

    Raises
    ------
    ValueError
        If they are not this model's, or a file is not what the index says.
    OSError, pickle.UnpicklingError
        If they can't be read.

    """
    index = from_first(lambda: read_index(folder), group)
    wanted = model_tensors(model)
    there = {name.removeprefix("model.") for name in index.state_dict_metadata if name.startswith("model.")}
    if missing := sorted(wanted.keys() - there):
        raise ValueError(f"its weights lack {len(missing)} of the model's: {some(missing)}")
    if unknown := sorted(there - wanted.keys()):
        raise ValueError(f"the model has not {len(unknown)} of its weights: {some(unknown)}")
    for name, tensor in wanted.items():
        saved = index.state_dict_metadata[f"model.{name}"].size  # type: ignore[union-attr]
        if saved != tensor.shape:
            raise ValueError(f"its {name} is {list(saved)}, the model's is {list(tensor.shape)}")
    read_into({"model": wanted}, folder, index, group)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Load a checkpoint's optimizer state, learning rates included. A collective on ``group``; None is one process.

    Raises
    ------
    ValueError
        If it was made for other parameters, or a file is not what the index says.
    OSError, pickle.UnpicklingError
        If it can't be read.

    """
    reshard(model)  # the optimizer's parameters are the sharded ones; reading a state dict has FSDP2 do so itself
    index, (options, values) = from_first(lambda: (read_index(folder), read_options(folder)), group)
    names = names_for(model, optimizer)
    parameters = {names[parameter]: parameter for each in optimizer.param_groups for parameter in each["params"]}
    for what, wrong in (
        ("does not know {} of the trained parameters", parameters.keys() - options.keys()),
        ("has {} parameters that are not trained now", options.keys() - parameters.keys()),
    ):
        if wrong:
            raise ValueError(f"its optimizer {what.format(len(wrong))}: {some(sorted(wrong))}")
    states = dict(empty_states(index, parameters))
    tensors = {f"state.{fqn}.{name}": tensor for (fqn, name), tensor in states.items()}
    if tensors:  # plain SGD has none
        read_into({"optim": tensors}, folder, index, group)
    made: dict[str, dict[str, Any]] = {}
    for (fqn, name), tensor in states.items():
        put(made.setdefault(fqn, {}), name, tensor)
    for fqn, found in values.items():
        for name, value in found.items():
            put(made.setdefault(fqn, {}), name, value)
    give(optimizer, names, options, made)
