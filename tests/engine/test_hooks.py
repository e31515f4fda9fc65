"""Dispatch to plugins: order, whose hook failed, and an end that always comes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.hooks import Hooks, PluginError
from torchturbo.plugins import Plugin, Run
from torchturbo.runtime.cpu import RUNTIME


def run() -> Run:
    return Run(build_from_args(parse_torchturbo_args([])[0]), RUNTIME)


class Noting(Plugin):
    """Notes every hook that reaches it in a list shared by all."""

    def __init__(self, notes: list[Any], mark: str) -> None:
        super().__init__()
        self.notes, self.mark = notes, mark

    def step_end(self, run: Run) -> None:
        self.notes.append((self.mark, "step_end", run.step))

    def end(self, run: Run) -> None:
        self.notes.append((self.mark, "end"))

    def model_built(self, model: Any, run: Run) -> None:
        self.notes.append((self.mark, "model_built", next(model.parameters()).dtype, run.model is model))

    def before_shard(self, model: Any, run: Run) -> None:
        self.notes.append((self.mark, "before_shard", next(model.parameters()).dtype))

    def paused(self, run: Run) -> None:
        self.notes.append((self.mark, "paused"))

    def resumed(self, run: Run) -> None:
        self.notes.append((self.mark, "resumed"))


class Failing(Plugin):
    name = "failing one"

    def step_end(self, run: Run) -> None:
        raise KeyError("nothing there")

    def end(self, run: Run) -> None:
        raise OSError("disk full")


def test_plugins_are_called_in_their_order() -> None:
    """The user's in the order given; what comes after them does too."""
    notes: list[Any] = []

    Hooks(run(), [Noting(notes, "a"), Noting(notes, "b")]).call("step_end")

    assert [("a", "step_end", 0), ("b", "step_end", 0)] == notes


def test_a_failing_hook_is_named_with_its_plugin_and_cause() -> None:
    """An error of a plugin must not look like one of the engine's."""
    with pytest.raises(PluginError, match=r"plugin failing one: step_end: KeyError: 'nothing there'") as caught:
        Hooks(run(), [Failing()]).call("step_end")

    assert isinstance(caught.value.__cause__, KeyError)


def test_the_end_reaches_every_plugin_and_its_error_is_told(logged: list[str]) -> None:
    """One that fails keeps none of the others from closing its files."""
    notes: list[Any] = []

    hooks = Hooks(run(), [Failing(), Noting(notes, "b")])
    with hooks.ending():
        pass

    assert [("b", "end")] == notes
    assert ["plugin failing one: end: OSError: disk full"] == [str(error) for error in hooks.end_errors]
    assert "plugin failing one: end: OSError: disk full" in logged


@pytest.mark.parametrize("error", [ValueError("of the run"), KeyboardInterrupt()])
def test_an_error_of_the_run_is_not_hidden_by_one_at_its_end(error: BaseException, logged: list[str]) -> None:
    """The first error is the one to mend; the other is a warning."""
    notes: list[Any] = []

    with pytest.raises(type(error)), Hooks(run(), [Failing(), Noting(notes, "b")]).ending():
        raise error

    assert [("b", "end")] == notes
    assert any("failing one: end: OSError: disk full" in line for line in logged)


def test_aside_tells_when_training_pauses_and_goes_on() -> None:
    """A clock must stand still meanwhile."""
    notes: list[Any] = []
    hooks = Hooks(run(), [Noting(notes, "a")])

    with hooks.aside():
        notes.append("evaluation")

    assert [("a", "paused"), "evaluation", ("a", "resumed")] == notes


def test_the_model_is_shown_as_loaded_and_again_before_it_is_sharded() -> None:
    """In between lies all that the engine does to it: here the precision step."""
    import torch

    notes: list[Any] = []
    config = build_from_args(parse_torchturbo_args([])[0])
    model = tiny.model().to(torch.bfloat16)

    Engine(config, Context(hooks=Hooks(run(), [Noting(notes, "a")]))).prepare(model)

    assert [("a", "model_built", torch.bfloat16, True), ("a", "before_shard", torch.float32)] == notes


def test_only_hooks_of_its_own_count_as_a_plugins_own() -> None:
    """A loss term exists where the plugin has one, not because the base class has an empty one."""
    hooks = Hooks(run(), [Noting([], "a"), Failing()])

    assert hooks.plugins == tuple(hooks.overriding("step_end"))
    assert [] == hooks.overriding("loss_term")
