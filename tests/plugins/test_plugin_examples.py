"""The plugins in examples/: each does what its first lines say, against an oracle, also after a resume and on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plugin_runs import Gradients
from plugin_runs import command as run_of
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.hooks import PluginError
from torchturbo.errors import ConfigError
from torchturbo.plugins.load import load_plugins
from torchturbo.plugins.schema import check
from torchturbo.plugins.settings import read_settings
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples
from torchturbo.train.run import train

FOLDER = Path(__file__).parents[2] / "examples" / "plugins"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def command(material: Path, output: Path, *words: str) -> list[str]:
    """Return the words of a run of four steps, so that there is a middle to resume from."""
    return run_of(material, output, *words, steps=4)


def given(name: str, settings: str, folder: Path) -> list[str]:
    """Return the words that load an example with settings of a test's own."""
    path = folder / f"{name}.yaml"
    path.write_text(settings)
    return ["--tt_plugin", f"{FOLDER / name}.py:{path}"]


def made(*words: str, framework: str = "hf_trainer") -> Any:
    return load_plugins(build_from_args(parse_torchturbo_args(words)[0]), framework)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_with_the_settings_beside_it(path: Path) -> None:
    """Its YAML fits its schema and says something; each property has a text for the editor."""
    (plugin,), problems = made("--tt_plugin", f"{path}:{path.with_suffix('.yaml')}")
    schema = type(plugin).settings_schema
    document, _ = read_settings(str(path.with_suffix(".yaml")))

    assert ([], path.stem) == (problems, plugin.name)
    assert document is not None and document.values and check(document, schema)[1] == []
    assert all(part.get("description") for part in schema["properties"].values())
    assert f"--tt_plugin examples/plugins/{path.name}:examples/plugins/{path.stem}.yaml" in path.read_text()


def test_there_are_plugins_for_any_framework_and_for_one() -> None:
    assert ["ema", "target_loss", "z_loss"] == [path.stem for path in EXAMPLES]
    settings = FOLDER / "target_loss.yaml"

    _, (problem,) = made("--tt_plugin", f"{FOLDER / 'target_loss.py'}:{settings}", framework="llama_factory")
    assert problem.message == "is a plugin for hf_trainer, and this run is under llama_factory"


# ---- ema ----


class Weights(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights before the first and after each step."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def keep(self, model: Any) -> None:
        self.kept.append({name: parameter.detach().double().clone() for name, parameter in model.named_parameters()})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.keep(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.keep(model)


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        ("decay: 0.3\nwarm_up: true\ndevice: cpu\n", [2 / 11, 3 / 12, 0.3, 0.3]),
        ("decay: 0.9\nwarm_up: false\n", [0.9] * 4),
    ],
)
def test_the_averages_are_those_of_the_formula(
    settings: str, decays: list[float], material: Path, tmp_path: Path
) -> None:
    """In float64, from the weights of every step; the trained model itself stays as it is."""
    weights = Weights()
    result = train(command(material, tmp_path / "out", *given("ema", settings, tmp_path)), callbacks=[weights])
    expected = weights.kept[0]
    for decay, after in zip(decays, weights.kept[1:], strict=True):
        expected = {name: decay * mean + (1 - decay) * after[name] for name, mean in expected.items()}

    averaged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "ema")
    assert averaged.config.use_cache
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-7)
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter.double(), weights.kept[-1][name])
    assert not torch.equal(averaged.model.norm.weight, result.model.model.norm.weight)


def test_a_resumed_average_is_bit_equal(material: Path, tmp_path: Path) -> None:
    """It lies in each checkpoint, and its warm-up goes by the steps of the whole run."""
    ema = given("ema", "decay: 0.9\n", tmp_path)
    train(command(material, tmp_path / "one", "--save_steps", "2", *ema))
    resume = ["--resume_from_checkpoint", str(tmp_path / "one" / "checkpoint-2")]
    train(command(material, tmp_path / "two", "--save_steps", "2", *ema, *resume))

    for file in ("ema/model.safetensors", "checkpoint-4/ema.safetensors"):
        first, second = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert first.keys() == second.keys() and len(first) > 10
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_average_can_begin_at_a_checkpoint_without_one(material: Path, tmp_path: Path) -> None:
    """Allowed explicitly, it starts from the checkpoint's weights and not from the untrained ones."""
    train(command(material, tmp_path / "one", "--save_steps", "2"))
    words = ["--resume_from_checkpoint", str(tmp_path / "one" / "checkpoint-2"), "--tt_resume_allow", "plugins"]
    weights = Weights()
    train(
        command(material, tmp_path / "two", *given("ema", "decay: 0.5\nwarm_up: false\n", tmp_path), *words),
        callbacks=[weights],
    )
    before = load_file(tmp_path / "one" / "checkpoint-2" / "model.safetensors")["model.norm.weight"].double()
    third, fourth = (kept["model.norm.weight"] for kept in weights.kept[-2:])

    average = load_file(tmp_path / "two" / "ema" / "model.safetensors")["model.norm.weight"].double()
    torch.testing.assert_close(average, 0.25 * before + 0.25 * third + 0.5 * fourth, rtol=1e-5, atol=1e-7)


class Failure(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")


def test_a_failed_run_leaves_no_averaged_model(material: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        train(command(material, tmp_path / "out", *given("ema", "{}\n", tmp_path)), callbacks=[Failure()])

    assert not (tmp_path / "out" / "ema").exists()


def test_a_save_that_fails_leaves_the_weights_and_no_half_of_a_model(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier averages stay as well; a run that succeeds puts its own in their place."""
    out = tmp_path / "out"
    ema = given("ema", "decay: 0.9\nwarm_up: false\n", tmp_path)
    train(command(material, out, *ema))
    (out / "ema" / "earlier").touch()
    real, weights = TurboTrainer.save_model, Weights()

    def failing(self: Any, folder: Any = None, **more: Any) -> None:
        real(self, folder, **more)
        if "ema" in str(folder):
            raise OSError("disk full")

    monkeypatch.setattr(TurboTrainer, "save_model", failing)
    with pytest.raises(PluginError, match="plugin ema: end: OSError: disk full"):
        train(command(material, out, "--overwrite_output_dir", *ema), callbacks=[weights])
    monkeypatch.undo()

    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor.double(), weights.kept[-1][name]) for name, tensor in saved.items())
    assert ["ema"] == [path.name for path in out.glob("*ema*")] and (out / "ema" / "earlier").exists()
    train(command(material, out, "--overwrite_output_dir", *ema))
    assert not (out / "ema" / "earlier").exists() and (out / "ema" / "model.safetensors").is_file()


# ---- z-loss ----


def rows(lengths: list[int]) -> Examples:
    ids = torch.randint(3, 320, (len(lengths), 12), generator=torch.Generator().manual_seed(1)).tolist()
    return Examples(
        [
            {"input_ids": row[:length], "labels": [-100, *row[1:length]]}
            for row, length in zip(ids, lengths, strict=True)
        ]
    )


def test_the_z_loss_is_the_papers(tmp_path: Path) -> None:
    """Value and every gradient against the formula written out, in four micro-batches of unequal lengths."""
    lengths = [12, 3, 7, 5, 12, 12, 2, 9]
    set_torchturbo_args(None)
    plugins, _ = made(*given("z_loss", "coefficient: 0.01\n", tmp_path))
    gradients = Gradients()
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, logging_steps=1,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    data = rows(lengths)
    trainer = TurboTrainer(
        model=tiny.model(), args=arguments, train_dataset=data, data_collator=Collator(0), callbacks=[gradients],
        turbo_plugins=plugins,
    )  # fmt: skip
    trainer.train()

    oracle = tiny.model()
    cross_entropy, squares, count = torch.zeros(()), torch.zeros(()), 0
    for row in (data[at] for at in range(len(lengths))):
        logits = oracle(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        targets = torch.tensor(row["labels"])[1:]
        cross_entropy = cross_entropy + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        squares = squares + sum(torch.log(torch.exp(position).sum()) ** 2 for position in logits)
        count += len(targets)
    (cross_entropy / count + 0.01 * squares / count).backward()

    logged = next(entry for entry in trainer.state.log_history if "z_loss" in entry)
    assert pytest.approx(float(0.01 * squares / count), rel=1e-6) == logged["z_loss"]
    assert pytest.approx(float((cross_entropy + 0.01 * squares) / count), rel=1e-6) == logged["loss"]
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(gradients.kept[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_the_z_loss_refuses_a_run_without_logits(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its start, with everything else that is wrong."""
    (tmp_path / "turbo.yaml").write_text("loss_chunk:\n  enabled: true\n")
    words = ["--tt_config", str(tmp_path / "turbo.yaml"), *given("z_loss", "{}\n", tmp_path)]

    with pytest.raises(ConfigError):
        train(command(material, tmp_path / "out", *words))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"examples/plugins/z_loss\.py:\d+: plugin z_loss: it needs the logits, which loss_chunk", line)
    assert not (tmp_path / "out").exists()


def one_rank(rank: int, words: list[str]) -> list[tuple[float, float]]:
    result = train(words, quiet=True)
    return [(entry["loss"], entry["z_loss"]) for entry in result.log_history if "z_loss" in entry]


def test_z_loss_and_average_are_the_same_on_two_ranks(material: Path, tmp_path: Path) -> None:
    words = [
        "--tt_gbs",
        "4",
        *given("z_loss", "coefficient: 0.01\n", tmp_path),
        *given("ema", "decay: 0.5\n", tmp_path),
    ]
    (one,) = run_ranks(1, one_rank, command(material, tmp_path / "one", *words))
    two = run_ranks(2, one_rank, command(material, tmp_path / "two", *words))

    for rank in two:
        for expected, actual in zip(one, rank, strict=True):
            assert pytest.approx(expected, rel=1e-5) == actual
    first, second = (load_file(tmp_path / name / "ema" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=2e-4)  # four steps of Adam


# ---- target loss ----


def test_training_stops_after_so_many_losses_below_the_target(material: Path, tmp_path: Path) -> None:
    """With a checkpoint there; the count goes on after a resume."""
    target = given("target_loss", "target: 100\npatience: 3\n", tmp_path)
    words = ["--max_steps", "9", "--save_strategy", "no"]
    result = train(command(material, tmp_path / "out", *words, *target))

    assert 3 == result.steps
    assert [1, 2, 3] == [entry["below_target"] for entry in result.log_history if "loss" in entry]
    assert (tmp_path / "out" / "checkpoint-3").is_dir()

    train(command(material, tmp_path / "a", "--max_steps", "9", "--save_steps", "2", *target))
    resume = ["--resume_from_checkpoint", str(tmp_path / "a" / "checkpoint-2")]
    again = train(command(material, tmp_path / "b", "--max_steps", "9", "--save_steps", "2", *target, *resume))
    assert 3 == again.steps


def test_a_loss_above_the_target_counts_from_the_beginning(material: Path, tmp_path: Path) -> None:
    """No stop here, and no checkpoint where none is wanted."""
    low = given("target_loss", "target: -1\n", tmp_path)
    assert 4 == train(command(material, tmp_path / "low", "--save_strategy", "no", *low)).steps

    plain = given("target_loss", "target: 100\npatience: 1\ncheckpoint: false\n", tmp_path)
    result = train(command(material, tmp_path / "out", "--save_strategy", "no", *plain))
    assert 1 == result.steps
    assert not list((tmp_path / "out").glob("checkpoint-*"))
