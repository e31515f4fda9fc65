"""What a plugin finds wrong with a run before it begins, and what it logs that is no number: told with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_runs import command, trainer

from torchturbo.engine.hooks import PluginError
from torchturbo.errors import ConfigError, Problem
from torchturbo.plugins import Plugin
from torchturbo.train.run import train

REFUSING = """\
from torchturbo.plugins import Plugin, register

@register()
class Refusing(Plugin):
    def problems(self, model, run):
        first = next(model.parameters())
        return [f"no {run.framework} on {first.device} with {model.config.vocab_size}", "and no luck"]
    def model_built(self, model, run):
        raise AssertionError
"""


def test_a_plugin_refuses_a_run_before_a_weight_is_read(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All it says, at its place, with what is wrong besides; the model is on the meta device."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REFUSING)
    words = ["--tt_plugin", "mine.py", "--optim_target_modules", "nothing", "--optim", "galore_adamw"]
    with pytest.raises(ConfigError):
        train(command(material, "out", *words))
    lines = capsys.readouterr().err.splitlines()

    assert [
        "error: mine.py:5: plugin Refusing: no hf_trainer on meta with 320",
        "error: mine.py:5: plugin Refusing: and no luck",
    ] == lines[:2]
    assert not Path("out").exists()


class Saying(Plugin):
    """Finds whatever the test says."""

    found: Any = ()

    def problems(self, model: Any, run: Any) -> Any:
        return self.found


def saying(found: Any) -> Saying:
    plugin = Saying()
    plugin.found = found
    return plugin


def test_a_trainer_of_ones_own_asks_too(tmp_path: Path) -> None:
    """A Problem keeps its own place and key; nothing, None and no hook are no problem."""
    own = Problem("turbo.yaml:1:1", "loss_chunk.enabled", "is on", "turn it off")
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, [saying([own, Problem("", "", "is odd")]), Plugin()])
    first, second = caught.value.problems

    assert own == first
    assert ("plugin Saying", "is odd") == (second.key, second.message)
    assert second.place.partition(":")[0].endswith("test_plugin_problems.py")
    for nothing in ((), [], None):
        trainer(tmp_path, [saying(nothing)])


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("a text", "str 'a text'"),
        (3, "int 3"),
        ([3], r"list \[3\]"),
        (Problem("", "", "alone"), "Problem Problem"),
    ],
)
def test_what_is_no_list_of_messages_is_an_error(found: Any, told: str, tmp_path: Path) -> None:
    """The letters of a text would be told as problems."""
    with pytest.raises(PluginError, match=f"plugin Saying: problems: expected a list of messages, got {told}"):
        trainer(tmp_path, [saying(found)])


def test_an_error_in_the_hook_names_it(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchturbo.cli.train import run

    path = tmp_path / "mine.py"
    path.write_text(REFUSING.replace("first = ", "first = 1 / 0  # "))

    assert 1 == run(command(material, tmp_path / "out", "--tt_plugin", str(path)))
    assert "plugin Refusing: problems: ZeroDivisionError: division by zero" in capsys.readouterr().err


# ---- metrics ----


class Logging(Plugin):
    """Logs whatever the test says."""

    added: dict[Any, Any] = {}

    def log(self, metrics: Any, run: Any) -> None:
        metrics |= self.added


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ({"share": torch.tensor(0.5)}, r"'share': expected a number, got Tensor tensor\(0.5000\); write float\(...\)"),
        ({"share": "half"}, "'share': expected a number, got str 'half'$"),
        ({"loss": None}, "'loss': expected a number, got NoneType None$"),
        ({1: 0.5}, "1: expected a text as its name, got int"),
    ],
)
def test_a_metric_that_is_no_number_is_named(added: Any, told: str, tmp_path: Path) -> None:
    """At once, and not by the JSON of the next save."""
    plugin = Logging()
    plugin.added = added
    with pytest.raises(PluginError, match=f"plugin Logging: log: the metric {told}"):
        trainer(tmp_path, [plugin]).train()


def test_a_metric_of_somebody_else_is_none_of_a_plugins(tmp_path: Path) -> None:
    """A trainer may log texts; any number is fine."""
    from torchturbo.adapters.hf_trainer import TurboTrainer

    class Texts(TurboTrainer):
        def log(self, logs: Any, *args: Any, **more: Any) -> None:
            super().log({**logs, "note": "a text"}, *args, **more)

    plugin = Logging()
    plugin.added = {"a": 1, "b": 0.5, "c": True, "d": float("nan")}
    made = trainer(tmp_path, [plugin], kind=Texts)
    made.train()

    assert {"note": "a text", "a": 1, "c": True}.items() <= made.state.log_history[0].items()
