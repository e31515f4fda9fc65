"""An optimizer's state by the names of its parameters, so that groups and shards may be others when it is loaded.

``get_optimizer_state_dict`` of torch names the same things the same way. It makes the state of a fresh optimizer by a
step with gradients of zero; here it is made as the checkpoint has it, parameter by parameter: one that never got a
gradient had no state, and has none again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from torchturbo.checkpoint.files import write_text
from torchturbo.checkpoint.layout import OPTIMIZER_NAME
from torchturbo.checkpoint.names import parameter_names
from torchturbo.errors import shorten

PLAIN = (bool, int, float, str, type(None))
Options = dict[str, dict[str, Any]]


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's tensors by ``state.PARAMETER.NAME``, and everything else as JSON values.

    Raises
    ------
    ValueError
        If there is something in its state that is neither a tensor nor a plain value, or no parameter of the model.

    """
    names = names_for(model, optimizer)
    tensors: dict[str, Tensor] = {}
    values: Options = {}
    for parameter, state in optimizer.state.items():
        fqn = names[parameter]
        for name, value in _flat(state):
            if isinstance(value, Tensor):
                tensors[f"state.{fqn}.{name}"] = value
            elif isinstance(value, PLAIN):
                values.setdefault(fqn, {})[name] = value
            else:
                raise ValueError(f"the optimizer's {name} of {fqn} is a {type(value).__name__}, which can't be saved")
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "options": {name: _plain(value) for name, value in group.items() if _is_option(name, value)},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "values": values}


def names_for(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the names of an optimizer's parameters in the model; raises ValueError for parameters of something else."""
    names = parameter_names(model)
    if others := sum(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(f"the optimizer has {others} parameters that are not the model's, and have no name")
    return names


def write_options(options: Mapping[str, Any], folder: Path) -> None:
    """Write what of an optimizer is no tensor."""
    write_text(folder / OPTIMIZER_NAME, json.dumps(options, indent=1) + "\n")


def _flat(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_option(name: str, value: Any) -> bool:
    """Return whether a group's entry is a setting that JSON can hold; the rest the new optimizer has of its own."""
    if name in ("params", "param_names"):
        return False
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, PLAIN) or (isinstance(one, Tensor) and one.numel() == 1) for one in values)


def _is_plain(value: Any) -> bool:
    return all(isinstance(one, PLAIN) for one in (value if isinstance(value, list) else [value]))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, Tensor) else value


def read_options(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the options of each parameter's group, and the plain values of its state, by name."""
    try:
        found = json.loads((folder / OPTIMIZER_NAME).read_text(encoding="utf-8"))
        options = {str(name): dict(group["options"]) for group in found["groups"] for name in group["parameters"]}
        values = {str(fqn): dict(values) for fqn, values in found["values"].items()}
        if not all(_is_plain(one) for each in (*options.values(), *values.values()) for one in each.values()):
            raise ValueError("a setting that is none")
        return options, values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{OPTIMIZER_NAME} is damaged") from error


def empty_states(index: Metadata, parameters: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Make room for each tensor of the saved state: like its parameter, or a scalar, as optimizers keep them."""
    for key, saved in index.state_dict_metadata.items():
        if not key.startswith("optim.state."):
            continue
        parts = key.removeprefix("optim.state.").split(".")
        fqn, name = next(
            ((".".join(parts[:at]), ".".join(parts[at:])) for at in range(len(parts) - 1, 0, -1)
             if ".".join(parts[:at]) in parameters), ("", ""),
        )  # fmt: skip
        if not fqn:
            raise ValueError(f"its {key} belongs to no trained parameter")
        parameter, size = parameters[fqn], saved.size  # type: ignore[union-attr]
        dtype = saved.properties.dtype  # type: ignore[union-attr]
        if size == parameter.shape:
            yield (fqn, name), torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        elif isinstance(parameter, DTensor) and size != torch.Size([]):
            raise ValueError(f"its {name} of {fqn} is no tensor of the parameter's shape, and the parameter is sharded")
        else:
            yield (fqn, name), torch.empty(size, dtype=dtype, device="cpu" if not size else parameter.device)


def put(state: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into a state under a name that may lead through further mappings."""
    *path, last = name.split(".")
    for part in path:
        state = state.setdefault(part, {})
    state[last] = value


def give(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    options: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Any],
) -> None:
    """Give an optimizer its state by its own ``load_state_dict``, which counts the parameters through."""
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    count = 0
    for group in optimizer.param_groups:
        fqns = [names[parameter] for parameter in group["params"]]
        saved = options[fqns[0]] if fqns else {}
        if other := next((fqn for fqn in fqns if options[fqn] != saved), None):
            raise ValueError(
                f"its optimizer had other settings for {fqns[0]} than for {other}, which are one group now"
            )
        merged = {name: _like(name, saved[name], value) if name in saved else value for name, value in group.items()}
        merged |= {name: value for name, value in saved.items() if name not in group}
        merged["params"] = list(range(count, count + len(fqns)))
        state |= {count + at: states[fqn] for at, fqn in enumerate(fqns) if fqn in states}
        groups.append(merged)
        count += len(fqns)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(name: str, saved: Any, current: Any) -> Any:
    """Return a setting as JSON gave it in the form that the optimizer keeps it in; one of another form is refused."""
    if not _fits(saved, current):
        shown = list(current) if isinstance(current, tuple) else _plain(current)
        raise ValueError(f"its {OPTIMIZER_NAME} has {name} = {shorten(repr(saved), 60)}, expected one like {shown!r}")
    if isinstance(current, tuple):
        return tuple(saved)
    return torch.full_like(current, saved) if isinstance(current, Tensor) else saved


def _fits(saved: Any, current: Any) -> bool:
    """Return whether a setting can take the place of another: the optimizer's own checks are in its constructor.

    A switch may be undecided (``foreach=None``); a number is finite unless the present one is not.
    """
    current = _plain(current)
    if isinstance(current, list):
        return isinstance(saved, list) and len(saved) == len(current) and all(map(_fits, saved, current))
    if current is None:
        return isinstance(saved, PLAIN) and not (isinstance(saved, float) and not math.isfinite(saved))
    if isinstance(current, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(current, int | float):
        is_number = isinstance(saved, int | float) and not isinstance(saved, bool)
        return is_number and (math.isfinite(saved) or saved == current)
    return isinstance(saved, type(current))
