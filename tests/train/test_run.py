"""A whole run on a tiny model: what it writes, how it resumes, and what an interrupt leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.files import STAGING
from torchturbo.engine.config import load_config
from torchturbo.engine.hooks import PluginError
from torchturbo.errors import ConfigError
from torchturbo.observe.size import size
from torchturbo.train.run import TrainResult, train


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with dropout (so that random states matter) and rows."""
    folder = tmp_path_factory.mktemp("material")
    tiny.save(folder / "model", attention_dropout=0.1)
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(24))
    return folder


def command(material: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"),
        "--output_dir", str(output), "--max_steps", "6", "--learning_rate", "5e-3", "--per_device_train_batch_size", "2",
        "--use_cpu", *words,
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def losses(result: TrainResult) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in result.log_history if "loss" in entry}


def test_a_run_trains_and_writes_what_it_should(material: Path, tmp_path: Path) -> None:
    """Model, tokenizer, configuration, record, curve; the loss has fallen."""
    out = tmp_path / "out"
    result = train(command(material, out, "--tt_gbs", "2", "--max_steps", "12"))

    assert losses(result)[12] == result.final_loss < losses(result)[1] - 1
    assert (result.steps, result.output_dir) == (12, out)
    assert load_config(str(out / "torchturbo.yaml")) == result.config
    assert result.config.gbs == 2
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert result.curve == out / "loss_curve.png"
    record = json.loads((out / "torchturbo_run.json").read_text())
    assert record["step"] == 12
    assert record["run"]["gradient_accumulation_steps"] == 2
    assert record["run"]["world_size"] == 1
    assert record["run"]["dataset"][0]["rows"] == 24
    assert record["versions"]["torch"] == torch.__version__
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    "words", [["--tt_gbs", "3"], ["--per_device_train_batch_size", "5"], ["--dataloader_drop_last"]]
)
def test_the_steps_said_at_the_start_are_taken(
    words: list[str], material: Path, tmp_path: Path, logged: list[str]
) -> None:
    """24 rows, two and a half epochs."""
    epochs = ["--max_steps", "-1", "--num_train_epochs", "2.5", "--save_strategy", "no"]
    result = train(command(material, tmp_path / "out", *words, *epochs))

    assert any(line.endswith(f" sequences per step, {result.steps} steps") for line in logged)


def test_the_last_lines_say_how_much_memory_it_took(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Of the device: on the CPU the whole process."""
    result = train(command(material, tmp_path / "out"))

    assert (result.peak_memory or 0) > 100 << 20
    (line,) = (line for line in logged if line.startswith("done: 6 steps in "))
    assert line.endswith(f", final loss {result.final_loss:.4f}, peak memory {size(result.peak_memory or 0)}")


def test_the_saved_model_is_the_trained_one(material: Path, tmp_path: Path) -> None:
    """It loads with plain Transformers, generates with a cache, and its tokenizer brings the template."""
    out = tmp_path / "out"
    result = train(command(material, out, "--max_steps", "2"))

    model = AutoModelForCausalLM.from_pretrained(out)
    for (name, saved), trained in zip(model.named_parameters(), result.model.parameters(), strict=True):
        assert torch.equal(saved, trained), name
    assert model.config.use_cache
    assert result.model.config.use_cache
    assert not result.model.training
    assert AutoTokenizer.from_pretrained(out).chat_template == tiny.CHATML
    assert json.loads((out / "checkpoint-2" / "config.json").read_text())["use_cache"]


def test_a_checkpoint_holds_its_configuration(material: Path, tmp_path: Path) -> None:
    """Each one, beside what Trainer writes; save_total_limit is Trainer's."""
    out = tmp_path / "out"
    result = train(command(material, out, "--save_steps", "2", "--save_total_limit", "2"))

    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    for step in (4, 6):
        folder = out / f"checkpoint-{step}"
        assert load_config(str(folder / "torchturbo.yaml")) == result.config
        assert json.loads((folder / "torchturbo_run.json").read_text())["step"] == step
        native = ("native/.metadata", "native/__0_0.distcp", "native/optimizer.json")
        for name in ("model.safetensors", *native, "scheduler.pt", "rng_state.pth", "trainer_state.json"):
            assert (folder / name).is_file(), name


def test_the_best_checkpoint_is_found_and_kept(material: Path, tmp_path: Path) -> None:
    """Its path is that of the published folder, in the state that is saved too."""
    out = tmp_path / "out"
    words = [
        "--eval_dataset",
        str(material / "rows.jsonl"),
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
        "--save_steps",
        "2",
    ]
    result = train(command(material, out, *words, "--load_best_model_at_end", "--save_total_limit", "1"))

    state = result.trainer.state
    assert Path(state.best_model_checkpoint).is_dir()
    assert STAGING not in (out / "checkpoint-6" / "trainer_state.json").read_text()
    assert torch.equal(weights(out)["lm_head.weight"], weights(Path(state.best_model_checkpoint))["lm_head.weight"])


# ---- resuming ----


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends a run at a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Rates(TrainerCallback):  # type: ignore[misc]
    """Keeps the learning rate that each optimizer step was taken with."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.used.append(kwargs["optimizer"].param_groups[0]["lr"])


@pytest.mark.parametrize(
    "words", [[], ["--tt_gbs", "2"], ["--tt_mixed_precision", "bf16", "--packing", "--cutoff_len", "99"]]
)
def test_a_resumed_run_is_bit_equal(words: list[str], material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Losses, weights and optimizer are those of the run that was never interrupted."""
    whole = train(command(material, tmp_path / "whole", "--save_steps", "2", *words))
    with pytest.raises(KeyboardInterrupt):
        train(command(material, tmp_path / "part", "--save_steps", "2", *words), callbacks=[StopAt(5)])

    rest = train(command(material, tmp_path / "part", "--save_steps", "2", "--resume_from_checkpoint", "true", *words))

    assert any(line.startswith("done: steps 5-6 of 6 in ") for line in logged)
    assert losses(rest) == losses(whole)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "part")[name]), name
    native = [native_tensors(tmp_path / run / "checkpoint-6" / "native") for run in ("whole", "part")]
    assert any(name.endswith("exp_avg_sq") for name in native[0])
    assert native[0].keys() == native[1].keys()
    assert [name for name, tensor in native[0].items() if not torch.equal(tensor, native[1][name])] == []


def native_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a native state, by DCP's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()
    }
    load(tensors, checkpoint_id=folder)
    return tensors


@pytest.fixture(scope="module")
def stopped(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at step 2 of 6."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(KeyboardInterrupt):
        train(command(material, out, "--save_steps", "2"), callbacks=[StopAt(3)])
    return out


CHANGES = [
    (["--tt_gbs", "3"], {"gbs"}),
    (["--per_device_train_batch_size", "4"], {"per_device_train_batch_size"}),
    (["--seed", "3"], {"seed"}),
    (["--learning_rate", "1e-4"], {"learning_rate"}),
    (["--max_steps", "9"], {"max_steps"}),
    (["--lr_scheduler_type", "cosine"], {"lr_scheduler_type"}),
    (["--packing"], {"packing"}),
    (["--cutoff_len", "50"], {"cutoff_len"}),
    (["--train_on_prompt"], {"train_on_prompt"}),
    (["--tt_mixed_precision", "bf16"], {"mixed_precision"}),
]


@pytest.mark.parametrize(("words", "names"), CHANGES, ids=[" ".join(words) for words, _ in CHANGES])
def test_what_changes_the_data_or_the_schedule_stops_a_resume(
    words: list[str], names: set[str], stopped: Path, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock Trainer would skip samples or jump in the schedule without a word (integration facts, 4c)."""
    with pytest.raises(ConfigError) as caught:
        train(command(material, stopped, "--resume_from_checkpoint", "true", *words))

    assert {problem.key for problem in caught.value.problems} == names
    lines = capsys.readouterr().err
    for name in names:
        assert f"--tt_resume_allow {name}" in lines


def test_other_rows_stop_a_resume(stopped: Path, material: Path, tmp_path: Path) -> None:
    """The files are known by their content."""
    other = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(23))

    with pytest.raises(ConfigError) as caught:
        train(command(material, stopped, "--resume_from_checkpoint", "true", "--dataset", str(other)))

    assert {problem.key for problem in caught.value.problems} == {"dataset"}
    assert "made with rows.jsonl (24 rows, sha256 " in str(caught.value)
    assert "this run has rows.jsonl (23 rows, sha256 " in str(caught.value)


def test_the_same_rows_in_another_file_resume(stopped: Path, material: Path, tmp_path: Path) -> None:
    """What counts is what the file holds."""
    stopped = Path(shutil.copytree(stopped, tmp_path / "out"))
    renamed = shutil.copy(material / "rows.jsonl", tmp_path / "renamed.jsonl")

    result = train(command(material, stopped, "--resume_from_checkpoint", "true", "--dataset", str(renamed)))

    assert result.steps == 6


def test_a_final_save_that_fails_leaves_nothing(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No half of a model stays behind."""
    from transformers import Trainer

    def full(self: Any, output_dir: str, **kwargs: Any) -> None:
        Path(output_dir).mkdir(parents=True)
        (Path(output_dir) / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "save_model", full)
    with pytest.raises(OSError, match="No space left"):
        train(command(material, tmp_path / "out", "--save_strategy", "no"))

    assert not (tmp_path / "out" / STAGING).exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_weights_of_an_older_run_give_way(material: Path, tmp_path: Path) -> None:
    """A shard's index beside the new file would be loaded instead of it."""
    out = tmp_path / "out"
    out.mkdir()
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    for name in old:
        (out / name).write_text("old")

    train(command(material, out, "--save_strategy", "no"))

    assert (out / "model.safetensors").is_file()
    assert [name for name in old if (out / name).exists()] == []


def test_a_curve_that_cannot_be_written_does_not_lose_the_run(
    material: Path, tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is saved; the reason is said."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchturbo.train.run.write_curve", full)
    result = train(command(material, tmp_path / "out", "--save_strategy", "no"))

    assert result.curve is None
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert any("loss_curve.png could not be written: No space left on device" in line for line in logged)


def test_a_diverged_run_stops_and_saves_nothing(material: Path, tmp_path: Path, capsys: Any) -> None:
    """Transformers' own filter would show its loss as 0 and call it done."""
    from torchturbo.cli.train import run

    words = ["--learning_rate", "1e30", "--logging_steps", "1", "--save_strategy", "no"]
    assert run(command(material, tmp_path / "out", *words)) == 1

    assert "the run diverged; lower --learning_rate" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_old_checkpoints_outlive_a_run_that_cannot_begin(
    stopped: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed when the optimizer could be made, not before."""
    stopped = Path(shutil.copytree(stopped, tmp_path / "out"))

    def refuse(self: Any, *args: Any) -> None:
        raise RuntimeError("no optimizer")

    monkeypatch.setattr(TurboTrainer, "create_optimizer", refuse)
    with pytest.raises(RuntimeError, match="no optimizer"):
        train(command(material, stopped, "--overwrite_output_dir", "true"))

    assert (stopped / "checkpoint-2" / "native" / ".metadata").is_file()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("torchturbo_run.json", "{", "torchturbo_run.json: can't be read"),
        ("torchturbo.yaml", "", "torchturbo.yaml is damaged"),
        ("native/optimizer.json", "half", "native/optimizer.json is damaged"),
        ("trainer_state.json", "[]", "trainer_state.json is damaged"),
        ("native/__0_0.distcp", None, "native/__0_0.distcp is missing"),
    ],
)
def test_a_damaged_checkpoint_is_not_resumed(
    name: str, content: str | None, words: str, stopped: Path, material: Path, tmp_path: Path
) -> None:
    """By the file that is damaged, before the model is loaded."""
    folder = Path(shutil.copytree(stopped, tmp_path / "out")) / "checkpoint-2"
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)

    with pytest.raises(ConfigError) as caught:
        train(command(material, tmp_path / "out", "--resume_from_checkpoint", str(folder)))

    assert words in str(caught.value)


def test_a_finished_run_takes_no_further_step(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Trainer would train a step beyond the schedule's end; the model is the checkpoint's, and that is said."""
    out = tmp_path / "out"
    before = train(command(material, out, "--save_steps", "6"))
    saved = weights(out)
    (out / "model.safetensors").unlink()
    logged.clear()

    result = train(command(material, out, "--save_steps", "6", "--resume_from_checkpoint", "true"))

    assert (6, False, True) == (result.steps, result.trained, before.trained)
    assert before.log_history[:-1] == result.log_history  # the last entry is told after the last save
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(out).items())
    assert any("checkpoint-6 is the end of this run: nothing is left to train" in line for line in logged)
    assert any(line.startswith("done: nothing was left of 6 steps, final loss") for line in logged)


def test_the_newest_whole_checkpoint_is_resumed(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """A damaged one is passed over, and that is said."""
    out = tmp_path / "out"
    train(command(material, out, "--save_steps", "2", "--max_steps", "4"))
    (out / "checkpoint-4" / "optimizer.pt").write_text("half")

    words = ["--save_steps", "2", "--max_steps", "4", "--resume_from_checkpoint", "true"]
    train(command(material, out, *words))

    assert any("checkpoint-4 is passed over: optimizer.pt is damaged" in line for line in logged)
    assert any("resuming from" in line and line.endswith("checkpoint-2") for line in logged)


def test_a_checkpoint_of_another_trainer_is_resumed_without_comparing(
    stopped: Path, material: Path, tmp_path: Path, logged: list[str]
) -> None:
    """It has no record of ours; that nothing was compared is said."""
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    for name in ("torchturbo.yaml", "torchturbo_run.json"):
        (out / "checkpoint-2" / name).unlink()

    result = train(command(material, out, "--resume_from_checkpoint", str(out / "checkpoint-2")))

    assert result.steps == 6
    assert any("does not say how it was made: resuming without comparing" in line for line in logged)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--max_steps", "-1", "--num_train_epochs", "0"], "--num_train_epochs"),
        (
            ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "25"],
            "--dataloader_drop_last",
        ),
    ],
)
def test_a_run_without_a_step_is_refused(words: list[str], place: str, material: Path, tmp_path: Path) -> None:
    """It would pass the model it began with off as trained."""
    with pytest.raises(ConfigError) as caught:
        train(command(material, tmp_path / "out", *words))

    assert [problem.place for problem in caught.value.problems] == [place]
    assert not (tmp_path / "out").exists()


def test_a_second_run_is_kept_out_of_the_folder(material: Path, tmp_path: Path) -> None:
    """Each would remove what the other is writing."""
    from filelock import FileLock

    out = tmp_path / "out"
    out.mkdir()
    with FileLock(out / ".torchturbo.lock"), pytest.raises(ConfigError) as caught:
        train(command(material, out))

    assert "another run is writing to" in str(caught.value)
    train(command(material, out, "--save_strategy", "no"))
    assert not (out / ".torchturbo.lock").exists()


def test_a_set_smaller_than_a_step_is_said(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """gbs counts micro-batches, which is more rows than many expect."""
    words = ["--save_strategy", "no", "--max_steps", "1", "--tt_gbs", "100"]
    train(command(material, tmp_path / "out", *words))

    assert any("the dataset holds 24 sequences, fewer than the 200 of one step" in line for line in logged)


def test_a_permission_without_a_resume_is_said(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """It would be ignored in silence otherwise."""
    train(command(material, tmp_path / "out", "--save_strategy", "no", "--tt_resume_allow", "gbs"))

    assert any("--tt_resume_allow says nothing to a run that resumes nothing" in line for line in logged)


def test_an_accumulation_that_gives_way_is_reported_once(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """With the place where it was typed."""
    train(command(material, tmp_path / "out", "--tt_gbs", "2", "--gradient_accumulation_steps", "4"))

    (line,) = [line for line in logged if "gives way" in line]
    assert "--gradient_accumulation_steps 4 gives way to gbs 2 (--tt_gbs)" in line


def test_an_allowed_change_is_taken_and_said(stopped: Path, material: Path, tmp_path: Path, logged: list[str]) -> None:
    """And only that one; a name that is nothing gets the nearest."""
    stopped = Path(shutil.copytree(stopped, tmp_path / "out"))
    words = ["--resume_from_checkpoint", str(stopped / "checkpoint-2"), "--learning_rate", "1e-3"]
    with pytest.raises(ConfigError) as caught:
        train(command(material, stopped, *words, "--tt_resume_allow", "lerning_rate"))
    assert "did you mean learning_rate" in str(caught.value)

    rates = Rates()
    allowed = [*words, "--save_strategy", "no", "--tt_resume_allow", "learning_rate"]
    result = train(command(material, stopped, *allowed), callbacks=[rates])

    expected = [1e-3 * left / 6 for left in (4, 3, 2, 1)]
    assert rates.used == pytest.approx(expected)
    assert [entry["learning_rate"] for entry in result.log_history if entry.get("learning_rate")][2:] == pytest.approx(
        expected
    )
    assert any("another learning_rate" in line for line in logged)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("nowhere", "there is no such folder"), ("model", "no trainer_state.json in it")],
)
def test_a_checkpoint_that_is_none(
    wanted: str, words: str, stopped: Path, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are there are named."""
    with pytest.raises(ConfigError):
        train(command(material, stopped, "--resume_from_checkpoint", str(material / wanted)))

    line = capsys.readouterr().err
    assert words in line
    assert str(stopped / "checkpoint-2") in line


def test_old_checkpoints_are_not_trained_over(
    stopped: Path, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run into the same folder must say which it means."""
    with pytest.raises(ConfigError):
        train(command(material, stopped))

    assert "holds checkpoint-2 of an earlier run; go on with --resume_from_checkpoint true" in capsys.readouterr().err


def test_old_checkpoints_are_removed_where_asked(material: Path, tmp_path: Path) -> None:
    """Then the folder holds one run."""
    out = tmp_path / "out"
    train(command(material, out, "--save_steps", "2", "--max_steps", "4"))
    train(command(material, out, "--max_steps", "3", "--overwrite_output_dir", "true"))

    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]


# ---- interrupts and failures ----


def test_an_interrupt_leaves_the_last_checkpoint_and_the_curve(stopped: Path) -> None:
    """And nothing half-written."""
    assert sorted(path.name for path in stopped.iterdir()) == ["checkpoint-2", "loss_curve.png"]


def test_a_save_that_fails_leaves_no_checkpoint(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint appears when it is whole."""
    from transformers import Trainer

    def broken(self: Any, *args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Trainer, "_save_rng_state", broken)
    with pytest.raises(OSError, match="no space"):
        train(command(material, tmp_path / "out", "--save_steps", "2"))

    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert not list((tmp_path / "out").glob(f"{STAGING}/checkpoint-*"))


def test_what_a_killed_run_left_is_cleared(material: Path, tmp_path: Path) -> None:
    """A half-written checkpoint is never resumed from, and goes at the next start."""
    left = tmp_path / "out" / STAGING / "checkpoint-9"
    left.mkdir(parents=True)

    train(command(material, tmp_path / "out", "--max_steps", "1"))

    assert not left.exists()


# ---- options ----


def test_packing_trains_on_the_same_tokens(material: Path, tmp_path: Path) -> None:
    """In fewer sequences."""
    words = ["--packing", "--cutoff_len", "128", "--max_steps", "1"]
    packed = train(command(material, tmp_path / "a", *words))
    plain = train(command(material, tmp_path / "b", "--max_steps", "1"))

    assert len(packed.trainer.train_dataset) <= len(plain.trainer.train_dataset) / 2
    assert packed.trainer.turbo_facts["dataset_tokens"] == plain.trainer.turbo_facts["dataset_tokens"]


def test_packing_is_looked_at_and_trained_without_a_cache(material: Path, tmp_path: Path) -> None:
    """With a key-value cache Transformers reads no document boundaries; not every release's Trainer turns it off."""
    words = ["--packing", "--cutoff_len", "99", "--max_steps", "1", "--tt_gradient_checkpointing", "false"]
    cached: list[bool] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            cached.append(kwargs["model"].config.use_cache)

    result = train(command(material, tmp_path / "out", *words), callbacks=[Look()])

    assert cached == [False]
    assert result.model.config.use_cache


def test_evaluation_is_logged_and_drawn(material: Path, tmp_path: Path) -> None:
    """Once an epoch where nobody said when."""
    result = train(command(material, tmp_path / "out", "--eval_dataset", str(material / "rows.jsonl")))

    assert [entry["step"] for entry in result.log_history if "eval_loss" in entry] == [6]


def test_bf16_typed_for_the_framework_is_the_engines(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Its place is the option."""
    result = train(command(material, tmp_path / "out", "--bf16", "--max_steps", "1"))

    assert result.config.mixed_precision == "bf16"
    assert "mixed_precision = bf16  (--bf16)" in logged
    assert not result.trainer.args.bf16


@pytest.mark.parametrize("value", ["true", "false"])
def test_no_second_bar_is_drawn(value: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer's own would write over the line of progress, whatever is asked of it."""
    result = train(command(material, tmp_path / "out", "--disable_tqdm", value, "--max_steps", "1"))

    assert "it/s" not in capsys.readouterr().err
    names = {type(callback).__name__ for callback in result.trainer.callback_handler.callbacks}
    assert "Progress" in names and not names & {"ProgressCallback", "PrinterCallback", "NotebookProgressCallback"}


def test_quiet_says_nothing(
    material: Path, tmp_path: Path, logged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The caller draws the console."""
    train(command(material, tmp_path / "out", "--max_steps", "2"), quiet=True)

    assert logged == []
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_process_is_left_as_it_was(material: Path, tmp_path: Path) -> None:
    """Deterministic algorithms are a mode of the process."""
    train(command(material, tmp_path / "out", "--tt_use_deterministic_algorithms", "--max_steps", "1"))

    assert not torch.are_deterministic_algorithms_enabled()


def test_two_runs_are_the_same_run(material: Path, tmp_path: Path) -> None:
    """Seeds decide everything."""
    first, second = (train(command(material, tmp_path / name, "--max_steps", "3")) for name in "ab")

    assert losses(first) == losses(second)


def test_an_error_at_a_plugins_end_loses_no_model(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """The steps are done: the model is written first, then the error told."""
    plugin = tmp_path / "full.py"
    plugin.write_text(
        "from torchturbo.plugins import Plugin, register\n\n"
        "@register()\nclass Full(Plugin):\n    def end(self, run):\n        raise OSError('quota')\n"
    )
    with pytest.raises(PluginError, match="plugin Full: end: OSError: quota; the model is saved"):
        train(command(material, tmp_path / "out", "--max_steps", "2", "--tt_plugin", str(plugin)))

    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "plugin Full: end: OSError: quota" in logged
