"""Steps: plugins see the model on its way through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchturbo.engine.hooks import Hooks, PluginError, name_of
from torchturbo.errors import Problem
from torchturbo.plugins.activate import Candidate

if TYPE_CHECKING:
    from torch import nn

    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.plugins.contract import Plugin


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what plugins say keeps them from this run, each with its place."""
    hooks = context.hooks
    return [problem for plugin in hooks.overriding("problems") for problem in _problems_of(plugin, model, hooks)]


def _problems_of(plugin: Plugin, model: nn.Module, hooks: Hooks) -> list[Problem]:
    found = hooks.call_one(plugin, "problems", model)
    items = () if found is None else found
    single = isinstance(items, str | Problem) or not isinstance(items, Sequence)  # a Problem is a tuple of texts
    if single or not all(isinstance(item, str | Problem) for item in items):
        message = f"expected a list of messages, got {type(found).__name__} {found!r:.60}"
        raise PluginError(f"plugin {name_of(plugin)}: problems: {message}")
    place, key = Candidate(type(plugin)).place("problems"), f"plugin {name_of(plugin)}"
    problems = [item if isinstance(item, Problem) else Problem("", "", item) for item in items]
    return [item if item.place else item._replace(place=place, key=item.key or key) for item in problems]


def model_built(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Step: plugins see the model as it was loaded."""
    _tell("model_built", model, context)


def before_shard(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Step: plugins see the model while its parameters are whole."""
    _tell("before_shard", model, context)


def _tell(hook: str, model: nn.Module, context: Context) -> None:
    if context.hooks.run is not None:
        context.hooks.run.model = model
        context.hooks.call(hook, model)
