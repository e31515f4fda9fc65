"""The optimizer under Hugging Face's Trainer: the one that ``optimizer.name`` asks for, in place of Trainer's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from torchturbo.adapters.hf_arguments import place, said_values
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.optim.groups import layouts, matrices, parameter_groups, summary
from torchturbo.optim.muon import MuonAdamW

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.engine import Engine
    from torchturbo.runtime import Runtime

log = get_logger(__name__)

NAME = "optimizer.name"
ARGUMENTS = ("optim", "optim_args", "optim_target_modules")
"""Training arguments that choose an optimizer, or mean the one they choose."""
SHARDED = frozenset(
    {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "stable_adamw", "grokadamw"}
    | {"schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"}
)
"""Values of ``optim`` that were seen to train a sharded model as a whole one."""
NOT_SHARDED: tuple[tuple[str, str], ...] = (
    ("adalomo|lomo", "updates a parameter in the backward pass, before its gradient is that of all ranks"),
    ("adafactor", "keeps the means of whole rows and columns, and a rank has a shard of a matrix"),
    ("(galore|apollo)_.*", "projects whole matrices, and a rank has a shard of each"),
    ("adamw_torch_[48]bit", "keeps its state in tensors of torchao's, which no checkpoint of shards can hold"),
    (".*8bit|.*_bnb.*|(paged_)?(lion|adamw|ademamix)(_32bit)?", "is of bitsandbytes, which knows no sharded tensors"),
)
"""Values of ``optim``, as patterns, that a sharded model can't be trained with, and why."""


class OptimizerMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does about the optimizer."""

    turbo: Engine

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        optimizer: Any
        optimizer_cls_and_kwargs: Any
        get_decay_parameter_names: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.turbo.config
        given = {
            "Trainer(optimizers)": self.optimizer,
            "Trainer(optimizer_cls_and_kwargs)": self.optimizer_cls_and_kwargs,
        }
        said = said_values(self.args)
        if problems := optimizer_clashes(config, said, given):
            fail(problems)
        if self.turbo.context.sharded and (name := _chosen(said)) and name not in SHARDED:
            log.warning_rank0("%s: %s was never tried on a sharded model", place("optim", typed=False), name)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer that the configuration names, or Trainer's own."""
        if self.optimizer is None and self.turbo.config.optimizer.name is not None:
            model = next((value for value in (*args, kwargs.get("model")) if value is not None), self.model)
            names = self.get_decay_parameter_names(model)
            self.optimizer = make_optimizer(model, self.args, self.turbo.config, names, self.turbo.context.runtime)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]


def make_optimizer(
    model: nn.Module, args: Any, config: EngineConfig, decays: Collection[str], runtime: Runtime
) -> MuonAdamW:
    """Return Muon for the hidden matrices of a model and AdamW for the rest, and say how much of each.

    Parameters
    ----------
    model
        The model, sharded or not.
    args
        Training arguments; learning rate, decay, betas and eps serve both kinds.
    config
        Says in which number format the run computes.
    decays
        Names of the parameters that decay.
    runtime
        The device.

    Raises
    ------
    ConfigError
        If there is no trained matrix.

    """
    if (problem := nothing_for_muon(model, config)) is not None:
        fail([problem])
    _, options = Trainer.get_optimizer_cls_and_kwargs(args)  # those of its default, which is AdamW
    dtype = newton_schulz_dtype(config, runtime)
    groups = parameter_groups(model, args.weight_decay, decays)
    for matrix in matrices(model):
        log.debug_rank0("muon: %s %s %s", matrix.name, list(matrix.parameter.shape), matrix.fused or "")
    log.info_rank0("optimizer: %s; Newton-Schulz in %s", summary(model), str(dtype).removeprefix("torch."))
    return MuonAdamW(groups, layouts=layouts(model), ns_dtype=dtype, **options)


def newton_schulz_dtype(config: EngineConfig, runtime: Runtime) -> torch.dtype:
    """Return bf16 for a run that computes in it on a device that is fast at it, fp32 for every other, the CPU's too."""
    fast = runtime.device_type != "cpu" and runtime.supports_bf16() and not runtime.emulates_bf16()
    return torch.bfloat16 if fast and config.mixed_precision == "bf16" else torch.float32


def nothing_for_muon(model: nn.Module, config: EngineConfig) -> Problem | None:
    """Return a problem where Muon is asked for and no trained parameter is a hidden matrix."""
    if config.optimizer.name is None or any(matrix.parameter.requires_grad for matrix in matrices(model)):
        return None
    message = (
        f"{type(model).__name__} has no trained linear layer or experts in its layers, and Muon updates nothing else"
    )
    return Problem(config.origin(NAME).place, NAME, message, "remove it, or train those too")


def optimizer_clashes(
    config: EngineConfig, said: Mapping[str, Any], given: Mapping[str, Any] | None = None, *, typed: bool = False
) -> list[Problem]:
    """Return a problem for each other optimizer that was asked for beside ``optimizer.name``.

    ``said`` are training arguments, ``given`` what the trainer got in code, by where it was given.
    """
    if config.optimizer.name is None:
        return []
    others = [place(name, typed) for name in ARGUMENTS if said.get(name)]
    others += [where for where, value in (given or {}).items() if value is not None]
    asked = config.origin(NAME).place or NAME
    message = f"chooses an optimizer, and {asked} {config.optimizer.name} chooses another"
    return [Problem(where, NAME, message, "leave one of them out") for where in others]


def shard_clashes(said: Mapping[str, Any], sharded: bool, *, typed: bool = False) -> list[Problem]:
    """Return a problem where the chosen optimizer can't go over a sharded model; ``said`` are training arguments."""
    name = _chosen(said)
    reason = next((reason for pattern, reason in NOT_SHARDED if re.fullmatch(pattern, name)), None)
    if not sharded or reason is None:
        return []
    remedy = f"use adamw_torch, the key {NAME} with muon, or one process"
    return [Problem(place("optim", typed), "", f"{name} {reason}", remedy)]


def _chosen(said: Mapping[str, Any]) -> str:
    """Return the value of ``optim``, empty where it is the default."""
    name = said.get("optim", "")
    return str(getattr(name, "value", name))
