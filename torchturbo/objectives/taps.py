"""Taps: what an objective sees of a model's training forward, besides its output.

An objective that runs further layers needs the micro-batch as the caller gave it, before the ranks of a
sequence-parallel group take their parts; the states that a module of the model made; and the masks, positions and
other arguments that its layers were called with, which fit any attention and any number of ranks. All of it is held
from the beginning of a training forward to its end, where the loss terms are computed, and never in an evaluation or
while activation checkpointing runs a layer again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchturbo.objectives.graphs import outside_graphs
from torchturbo.ops.replace import Handle, remove_all


@dataclass
class Call:
    """How a module was called in the forward under way, the last time, and what it returned."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    """Reentrant checkpointing computes a layer without a graph: its output then carries no gradient."""


class Taps:
    """The taps of one model; make them after the normaliser is installed and before sequence parallelism is.

    Parameters
    ----------
    model
        The module that is called.
    base
        The Transformers model; another one where PEFT wraps it.

    """

    def __init__(self, model: nn.Module, base: nn.Module) -> None:
        self.batch: Mapping[str, Any] | None = None
        """The arguments of the training forward under way, by name; None outside of one."""
        self._names = list(inspect.signature(base.forward).parameters)
        self._calls: list[Call] = []
        self._handles: list[Handle] = [
            model.register_forward_pre_hook(_Hook(self, "enter"), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "leave"), with_kwargs=True, always_call=True),
        ]

    @property
    def open(self) -> bool:
        """Whether a training forward is under way."""
        return self.batch is not None

    def watch(self, module: nn.Module) -> Call:
        """Return what holds a module's call in each training forward, and nothing in between."""
        call = Call()
        self._calls.append(call)
        self._handles += [
            module.register_forward_pre_hook(_Watch(self, call, "before"), with_kwargs=True),
            module.register_forward_hook(_Watch(self, call, "after"), with_kwargs=True),
        ]
        return call

    def remove(self) -> None:
        """Take the hooks out of the model."""
        remove_all(self._handles)
        self._handles = []
        self.close()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a forward."""
        self.close()
        if module.training and torch.is_grad_enabled():
            self.batch = {**dict(zip(self._names, args, strict=False)), **kwargs}

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End a forward, also one that an error ended."""
        self.close()

    def close(self) -> None:
        """Let go of everything."""
        self.batch = None
        for call in self._calls:
            call.args, call.kwargs, call.output = (), {}, None


class _Hook:
    """A hook of taps on the called model; in a copy or a pickle of the model it does nothing."""

    def __init__(self, taps: Taps | None = None, name: str = "") -> None:
        self._taps, self._name = taps, name

    # A traced hook would note parts of the graph: it stays out of compiled graphs.
    @outside_graphs
    def __call__(self, *given: Any) -> None:
        if self._taps is not None:
            getattr(self._taps, self._name)(*given)

    def __reduce__(self) -> Any:
        return _Hook, ()


class _Watch:
    """A hook of taps on a module inside the model; in a copy or a pickle it does nothing."""

    def __init__(self, taps: Taps | None = None, call: Call | None = None, name: str = "") -> None:
        self._taps, self._call, self._name = taps, call, name

    # A traced hook would note parts of the graph: it stays out of compiled graphs.
    @outside_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None) -> None:
        if self._taps is None or self._call is None or not self._taps.open:
            return
        if self._name == "before":
            self._call.args, self._call.kwargs = args, kwargs
        else:
            self._call.output = output

    def __reduce__(self) -> Any:
        return _Watch, ()
