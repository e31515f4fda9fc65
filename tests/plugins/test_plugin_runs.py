"""Plugins in real runs: every hook in its place with what it promises, errors that name it, an end that always comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plugin_runs import RECORDER, TERM, command, recorder, trainer
from transformers import TrainerCallback

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.hooks import PluginError
from torchturbo.errors import ConfigError
from torchturbo.plugins import Plugin
from torchturbo.plugins.contract import HOOKS
from torchturbo.train.run import train

STEP = ["step_begin", *["loss_weight"] * 2, *["loss_term"] * 2, "step_end", "log"]


def test_a_run_comes_by_every_hook_in_the_order_of_the_guide(material: Path, tmp_path: Path) -> None:
    """``torchturbo train``: two steps of two micro-batches, an evaluation and a checkpoint after each second one."""
    words = ["--eval_dataset", str(material / "rows.jsonl"), "--eval_strategy", "steps", "--eval_steps", "2"]
    words += ["--save_steps", "2", "--tt_gbs", "2", "--tt_mixed_precision", "bf16", "--tt_plugin", str(RECORDER)]
    result = train(command(material, tmp_path / "out", *words))
    (plugin,) = (found for found in result.trainer.turbo.context.hooks.plugins if found.name == "recorder")

    aside = ["paused", "resumed", "paused", "save_checkpoint", "resumed"]
    assert ["model_built", "before_shard", "optimizer_built", *STEP, *STEP, *aside, "end"] == plugin.hooks
    notes = dict(plugin.notes)  # the last of each
    assert {
        "step": 0, "error": "NoneType", "dtype": "torch.float32", "device": "cpu", "same": True, "output_dir": "out",
        "framework": "hf_trainer", "rank": (0, 1),
    } == notes["model_built"]  # fmt: skip
    assert notes["before_shard"]["checkpointing"] is True  # the steps in between were taken
    assert (1, False) == (notes["optimizer_built"]["groups"] // 2, notes["optimizer_built"]["scheduled"])
    assert [0, 1] == [facts["step"] for hook, facts in plugin.notes if hook == "step_begin"]
    assert [1, 2] == [facts["step"] for hook, facts in plugin.notes if hook == "step_end"]
    assert (2, {"cpu"}) == (len(notes["step_begin"]["shapes"]), notes["step_begin"]["devices"])
    assert {"input_ids", "labels"} <= set(notes["loss_weight"]["keys"])
    assert notes["loss_term"]["logits"] == (*notes["loss_term"]["ids"], 320)
    assert notes["log"]["loss"]
    assert {"folder": "checkpoint-2", "final": False, "whole": True}.items() <= notes["save_checkpoint"].items()
    assert {"step": 2, "error": "NoneType", "saved": False}.items() <= notes["end"].items()

    logged = [entry["recorded"] for entry in result.log_history if "loss" in entry]
    assert 2 == len(logged) and logged[0] < logged[1]  # for every logger, beside the loss
    assert "kept" == (tmp_path / "out" / "checkpoint-2" / "recorder-0.txt").read_text()
    record = (tmp_path / "out" / "torchturbo_run.json").read_text()
    assert '"recorder"' in record


def test_a_resumed_run_shows_its_checkpoint_before_the_first_step(material: Path, tmp_path: Path) -> None:
    """Weights and optimizer are those of the checkpoint by then."""
    words = ["--save_steps", "1", "--tt_plugin", str(RECORDER)]
    train(command(material, tmp_path / "out", *words))
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    again = train(command(material, tmp_path / "again", *words, "--resume_from_checkpoint", checkpoint))
    (plugin,) = again.trainer.turbo.context.hooks.plugins[:1]

    assert ["model_built", "before_shard", "optimizer_built", "load_checkpoint", "step_begin"] == plugin.hooks[:5]
    facts = plugin.notes[3][1]
    assert ("checkpoint-1", True, 1) == (facts["folder"], facts["weights"], facts["step"])
    assert facts["moments"] > 0
    assert 1 == plugin.notes[4][1]["step"]  # steps before the resume count


def test_other_plugins_stop_a_resume_and_other_code_is_told(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """What a plugin adds to the loss would be missing from some step on."""
    mine = tmp_path / "mine.py"
    mine.write_text(RECORDER.read_text())
    train(command(material, tmp_path / "out", "--save_steps", "1", "--tt_plugin", str(mine)))
    resume = command(material, tmp_path / "b", "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-1"))

    with pytest.raises(ConfigError) as caught:
        train(resume)
    (problem,) = caught.value.problems
    assert ("plugins", "the checkpoint was made with [recorder], this run has none") == (
        problem.key,
        problem.message.partition(":")[0],
    )
    train([*resume, "--tt_resume_allow", "plugins"])

    mine.write_text("# a comment\n" + RECORDER.read_text())
    train([*resume, "--tt_plugin", str(mine), "--overwrite_output_dir"])
    assert [line for line in logged if line.endswith("was made with other code of the plugins recorder")]


def test_under_a_trainer_of_ones_own_with_peft(tmp_path: Path) -> None:
    """The plugin sees the wrapped model as it is trained; its loss term is called there too."""
    from peft import LoraConfig, get_peft_model

    plugin = recorder()
    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"]))
    made = trainer(tmp_path, [plugin], model=model)
    made.train()

    assert plugin.notes[0][1]["same"]
    assert made.turbo.context.hooks.run.model is model
    assert 2 == plugin.hooks.count("loss_term") == plugin.hooks.count("step_end")
    assert "end" == plugin.hooks[-1]


def test_evaluation_has_no_loss_term(tmp_path: Path) -> None:
    """It is a term of training; an evaluation's loss stays comparable with a run without the plugin."""
    plugin = recorder()
    made = trainer(tmp_path, [plugin])
    made.evaluate(made.train_dataset)
    made.predict(made.train_dataset)

    assert ["paused", "resumed"] * 2 == plugin.hooks[2:]  # outside of a training, and no end


def test_each_model_of_a_model_init_is_shown(tmp_path: Path) -> None:
    """One when the trainer is set up and one for each training, which also has an end of its own."""

    def fresh() -> Any:
        return tiny.model()

    plugin = recorder()
    made = trainer(tmp_path, [plugin], {"max_steps": 1}, model=None, model_init=fresh)
    shown = ["model_built", "before_shard"]
    assert shown == plugin.hooks
    for _ in range(2):
        before = len(plugin.hooks)
        made.train()
        hooks = plugin.hooks[before:]
        assert ([*shown, "optimizer_built"], "end") == (hooks[:3], hooks[-1])
        assert 1 == hooks.count("end") == hooks.count("model_built")


def test_an_upload_begins_before_a_plugin_adds_to_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As contract and guide say of push_to_hub: the folder has its final name, the upload has begun."""
    begun: list[list[str]] = []
    monkeypatch.setattr(TurboTrainer, "init_hf_repo", lambda self, **more: None)
    monkeypatch.setattr(TurboTrainer, "push_to_hub", lambda self, *args, **more: None)

    def push(self: Any, folder: str) -> None:
        begun.append(sorted(path.name for path in Path(folder).glob("recorder-*")))

    monkeypatch.setattr(TurboTrainer, "_push_from_checkpoint", push)
    plugin = recorder()
    trainer(tmp_path, [plugin], {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}).train()

    assert [[]] == begun
    assert dict(plugin.notes)["save_checkpoint"]["final"]
    assert (tmp_path / "checkpoint-2" / "recorder-0.txt").is_file()


# ---- errors ----

FAILING = """\
from torchturbo.plugins import Plugin, register

def fail(*args):
    raise ValueError("on purpose")

@register()
class Failing(Plugin):
    {hook} = lambda self, {names}: fail()

@register()
class Other(Plugin):
    ended = []
    def end(self, run):
        self.ended.append(type(run.error).__name__)
        open({path!r}, "a").write(type(run.error).__name__)
"""


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in ("problems", "loss_weight", "end")])
def test_an_error_in_a_hook_ends_the_run_with_its_name(
    hook: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, one line with plugin, hook and cause; every plugin is told that the run is over."""
    import inspect

    from torchturbo.cli.train import run

    names = ", ".join(list(inspect.signature(getattr(Plugin, hook)).parameters)[1:])
    ended = tmp_path / "ended"
    path = tmp_path / "failing.py"
    path.write_text(FAILING.format(hook=hook, names=names, path=str(ended)))
    words = command(material, tmp_path / "out", "--save_steps", "1", "--tt_plugin", str(path))
    if hook == "load_checkpoint":
        train(command(material, tmp_path / "first", "--save_steps", "1"))
        resume = ["--resume_from_checkpoint", str(tmp_path / "first" / "checkpoint-1"), "--tt_resume_allow", "plugins"]
        words += resume

    assert 1 == run(words)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert [f"error: PluginError: plugin Failing: {hook}: ValueError: on purpose; set TORCHTURBO_DEBUG=1 to see where it"
            " happened"] == lines  # fmt: skip
    assert "PluginError" == ended.read_text()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_error_in_a_loss_weight_is_named_too(tmp_path: Path) -> None:
    class Weighed(Plugin):
        def loss_term(self, outputs: Any, batch: Any, run: Any) -> Any:
            return outputs["logits"].sum()

        def loss_weight(self, batch: Any, run: Any) -> Any:
            return batch["nothing"]

    with pytest.raises(PluginError, match="plugin Weighed: loss_weight: KeyError: 'nothing'"):
        trainer(tmp_path, [Weighed()]).train()


class Constant(Plugin):
    """Its loss term is whatever the test says."""

    term: Any = None

    def loss_term(self, outputs: Any, batch: Any, run: Any) -> Any:
        return self.term


@pytest.mark.parametrize(
    ("term", "found"),
    [
        (0.5, "float 0.5"),
        (torch.ones(2, 3), r"a tensor \[2, 3\]"),
        (torch.ones(1), r"a tensor \[1\]"),
        ("x" * 100, "str 'x"),
    ],
)
def test_a_loss_term_that_is_no_scalar_is_named(term: Any, found: str, tmp_path: Path) -> None:
    """torch's own error would come from backward and name no plugin."""
    plugin = Constant()
    plugin.term = term
    message = f"plugin Constant: loss_term: expected a scalar tensor or None, got {found}"
    with pytest.raises(PluginError, match=message):
        trainer(tmp_path, [plugin]).train()


def test_a_plugin_that_exits_is_an_error_too(tmp_path: Path) -> None:
    """The program would otherwise end with its status and without a word."""

    class Leaving(Plugin):
        def step_end(self, run: Any) -> None:
            raise SystemExit(0)

    with pytest.raises(PluginError, match="plugin Leaving: step_end: SystemExit: 0"):
        trainer(tmp_path, [Leaving()]).train()


def test_a_loss_that_takes_no_term_is_refused(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Label smoothing and a loss function of one's own are computed past the model's loss, where terms are added."""
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, [Constant()], {"label_smoothing_factor": 0.1})
    assert ["plugin Constant: label smoothing takes no loss term; leave one of them out"] == [
        str(problem._replace(place="")) for problem in caught.value.problems
    ]
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, [Constant()], compute_loss_func=lambda *args, **more: None)
    assert "plugin Constant: a loss function of your own takes no loss term" in str(caught.value)
    trainer(tmp_path, [Plugin()], {"label_smoothing_factor": 0.1})  # a plugin without a term is fine

    path = tmp_path / "term.py"
    path.write_text(TERM)
    with pytest.raises(ConfigError):
        train(command(material, tmp_path / "out", "--label_smoothing_factor", "0.1", "--tt_plugin", str(path)))
    assert "--label_smoothing_factor: plugin Weighted: label smoothing takes no loss term" in capsys.readouterr().err


class OwnLoss(TurboTrainer):
    """Computes its loss from the logits, as many subclasses of Trainer do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_trainer_whose_loss_passes_the_terms_by_is_warned_of(tmp_path: Path, logged: list[str]) -> None:
    """It cannot be seen before the loss was computed once; then it is said once."""
    plugin = Constant()
    plugin.term = torch.ones(())
    trainer(tmp_path, [plugin], kind=OwnLoss).train()

    warned = [line for line in logged if "loss terms have no effect" in line]
    assert ["loss terms have no effect (Constant): the trainer computes its loss past the model's"] == warned
    logged.clear()
    trainer(tmp_path, [plugin]).train()
    assert not [line for line in logged if "no effect" in line]


class Interrupt(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_run_for_plugins_too(tmp_path: Path) -> None:
    plugin = recorder()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [plugin], callbacks=[Interrupt()]).train()

    assert ("end", "KeyboardInterrupt") == (plugin.notes[-1][0], plugin.notes[-1][1]["error"])
    assert 1 == plugin.hooks.count("end")


def test_a_second_training_of_one_trainer_has_an_end_of_its_own(tmp_path: Path) -> None:
    """The error of the first is not carried over."""
    plugin = recorder()
    made = trainer(tmp_path, [plugin], callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.remove_callback(Interrupt)
    made.train()

    ends = [facts["error"] for hook, facts in plugin.notes if hook == "end"]
    assert ["KeyboardInterrupt", "NoneType"] == ends


def test_a_run_that_cannot_be_set_up_is_over_for_its_plugins(tmp_path: Path) -> None:
    """The trainer's constructor fails after the model was shown."""
    plugin = recorder()
    with pytest.raises(TypeError):
        trainer(tmp_path, [plugin], callbacks=3)

    assert ["model_built", "before_shard", "end"] == plugin.hooks
    assert "TypeError" == plugin.notes[-1][1]["error"]


def test_all_problems_of_plugins_stand_with_those_of_the_run(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a weight is read; nothing is written."""
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    words = command(material, tmp_path / "out", "--tt_plugin", str(broken), "--tt_plugin", "nowhere.py")
    with pytest.raises(ConfigError):
        train([*words, "--dataset", "missing.jsonl"])
    lines = capsys.readouterr().err

    assert f"{broken}:1: ZeroDivisionError" in lines.replace("../", "")
    assert "nowhere.py: no such file" in lines
    assert "missing.jsonl" in lines
    assert not (tmp_path / "out").exists()


def test_a_command_line_that_is_wrong_already_tells_of_missing_plugins_and_runs_none(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything at once, as far as it goes without running code for a launch that does not come."""
    mark = tmp_path / "ran"
    mine = tmp_path / "mine.py"
    mine.write_text(f"open({str(mark)!r}, 'w')\n")
    words = command(material, tmp_path / "out", "--tt_plugin", f"{mine}:no.yaml", "--tt_plugin", "nowhere.py")
    with pytest.raises(ConfigError):
        train([*words, "--tt_plugin", "unknown-name", "--tt_bd_mask_low", "0.9"])
    lines = capsys.readouterr().err

    for part in ("diffusion.bd_mask_low", "no.yaml: no such file", "nowhere.py: no such file", "called unknown-name"):
        assert part in lines
    assert not mark.exists()
