"""Saving while training goes on: what is there when, who waits for it, and what an interrupt leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
from transformers import TrainerCallback

from torchturbo.adapters import hf_checkpoints
from torchturbo.checkpoint import background, native, output
from torchturbo.checkpoint.claims import LOCK
from torchturbo.checkpoint.damage import damage
from torchturbo.checkpoint.files import STAGING, clear_staging, remove
from torchturbo.errors import ConfigError

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


class AtStep(TrainerCallback):  # type: ignore[misc]
    """Calls a function with the step, at the beginning of each."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function = function

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state.global_step)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every write back until the event is set."""
    event = threading.Event()
    write = background.write

    def held(*args: Any) -> None:
        assert event.wait(60)
        write(*args)

    monkeypatch.setattr(background, "write", held)
    yield event
    event.set()


def test_training_goes_on_while_a_checkpoint_is_written(gate: threading.Event, tmp_path: Path) -> None:
    """It gets its name at the end of the step after it is whole, with the weights of the step it was saved at."""
    seen: dict[int, list[str]] = {}
    weights: dict[int, dict[str, torch.Tensor]] = {}

    def look(step: int) -> None:
        seen[step] = listing(tmp_path)
        weights[step] = mesh_runs.weights(made.model)
        if step == 3:
            gate.set()
            made._writing._saving.done.result()

    class SaveOnce(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 1

    made = mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[AtStep(look), SaveOnce()], max_steps=5)
    made.train()

    assert ([], [], ["checkpoint-1"]) == (seen[2], seen[3], seen[4])
    fresh = mesh_runs.trainer(str(tmp_path / "fresh"), [], "qwen3")
    native.load_model(fresh.model, tmp_path / "checkpoint-1" / "native")
    for name, tensor in mesh_runs.weights(fresh.model).items():
        assert torch.equal(weights[1][name], tensor), name


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of the state in memory, and names in order."""
    begun: list[str] = []
    start = background.Background.start

    def noted(self: Any, state: Any, staged: Path, place: Path, *rest: Any) -> None:
        begun.append(f"{place.name} after {listing(tmp_path)}")
        start(self, state, staged, place, *rest)

    monkeypatch.setattr(background.Background, "start", noted)
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=3).train()
    assert [
        "checkpoint-1 after []", "checkpoint-2 after ['checkpoint-1']",
        "checkpoint-3 after ['checkpoint-1', 'checkpoint-2']",
    ] == begun  # fmt: skip
    assert ["checkpoint-1", "checkpoint-2", "checkpoint-3"] == listing(tmp_path)


def test_a_callback_that_is_told_of_a_save_finds_it(tmp_path: Path) -> None:
    """LLaMA-Factory's adds a processor to the folder then; it must have its name, and keep what is added."""

    class Adding(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = tmp_path / f"checkpoint-{state.global_step}"
            assert damage(folder) is None
            (folder / "processor.json").write_text("{}")

    mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[Adding()], **SAVING, max_steps=2).train()
    assert all((tmp_path / f"checkpoint-{step}" / "processor.json").is_file() for step in (1, 2))


def test_an_interrupt_keeps_the_checkpoint_that_is_being_written(
    gate: threading.Event, tmp_path: Path, logged: list[str]
) -> None:
    """It is finished, for it is the newest."""

    def interrupt(step: int) -> None:
        if step == 2:
            threading.Timer(0.2, gate.set).start()
            raise KeyboardInterrupt

    made = mesh_runs.trainer(
        str(tmp_path), [], "qwen3", callbacks=[AtStep(interrupt)], save_strategy="steps", save_steps=2
    )
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert any("waiting until checkpoint-2 is written" in line for line in logged)
    assert ["checkpoint-2"] == listing(tmp_path)
    assert damage(tmp_path / "checkpoint-2") is None


def test_an_error_and_a_save_that_fails_leave_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """The first is the one to be seen; the second is told, and nothing is left of the save."""

    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def diverge(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(background, "write", no_room)
    made = mesh_runs.trainer(
        str(tmp_path), [], "qwen3", callbacks=[AtStep(diverge)], save_strategy="steps", save_steps=2
    )
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert [] == listing(tmp_path)
    assert not list((tmp_path / STAGING).glob("*"))
    assert any("checkpoint-2 is not saved: " in line and "No space left" in line for line in logged), logged


@pytest.mark.parametrize("moment", ["before it is written", "before its record", "before it gets its name"])
def test_a_checkpoint_that_lost_files_does_not_take_the_place_of_a_whole_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of one the whole one would go for it."""
    write, settle = background.write, background._settle

    def written(tensors: Any, folder: Path, group: Any) -> None:
        second = folder.parent.name == "checkpoint-2"
        if second and moment == "before it is written":
            remove(tmp_path / STAGING)  # as a run does that shares no locks with this one
        write(tensors, folder, group)
        if second and moment == "before its record":
            next(folder.glob("*.distcp")).unlink()

    def hold(saving: Any) -> None:
        settle(saving)
        if saving.place.name == "checkpoint-2" and moment == "before it gets its name":
            (saving.staged / "scheduler.pt").unlink()

    monkeypatch.setattr(background, "write", written)
    monkeypatch.setattr(background, "_settle", hold)
    made = mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=3, save_total_limit=1)
    with pytest.raises(ConfigError) as caught:
        made.train()
    assert f"{tmp_path / 'checkpoint-2'}: can't be saved: " in str(caught.value)
    assert "another process removed them" in str(caught.value)
    assert "give each run an output_dir of its own" in str(caught.value)
    assert ["checkpoint-1"] == listing(tmp_path)
    assert damage(tmp_path / "checkpoint-1") is None


def test_the_disk_has_all_of_a_checkpoint_before_it_gets_its_name_and_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps the newest checkpoint or the one before."""
    synced: set[tuple[int, int]] = set()
    seen: list[str] = []
    fsync, publish, rotate = os.fsync, background.publish_folder, hf_checkpoints.rotate_checkpoints

    def identity(found: os.stat_result) -> tuple[int, int]:
        return found.st_dev, found.st_ino

    def noted(handle: Any) -> None:
        synced.add(identity(os.fstat(handle if isinstance(handle, int) else handle.fileno())))
        fsync(handle)

    def published(staged: Path, place: Path) -> None:
        missing = [path.name for path in (staged, *staged.rglob("*")) if identity(path.stat()) not in synced]
        seen.append(f"{missing} not synced")
        publish(staged, place)
        synced.clear()

    def rotated(**kwargs: Any) -> None:
        seen.append(f"names synced: {identity(tmp_path.stat()) in synced}")
        rotate(**kwargs)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(background, "publish_folder", published)
    monkeypatch.setattr(hf_checkpoints, "rotate_checkpoints", rotated)
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()
    assert ["[] not synced", "names synced: True"] == seen


def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    """It is kept and loaded, though the state that is resumed names it where it was."""
    losses = iter([1.0, 5.0, 5.0, 5.0])

    def made(folder: Path, *callbacks: TrainerCallback) -> Any:
        trainer = mesh_runs.trainer(
            str(folder), [], "qwen3", callbacks=list(callbacks), eval_dataset=mesh_runs.rows(4), **SAVING,
            eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
            greater_is_better=False, save_total_limit=2,
        )  # fmt: skip
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_loss": next(losses)}
        return trainer

    def stop(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made(tmp_path / "before", AtStep(stop)).train()
    (tmp_path / "before").rename(tmp_path / "after")
    again = made(tmp_path / "after")
    again.train(resume_from_checkpoint=True)
    assert ["checkpoint-1", "checkpoint-4"] == listing(tmp_path / "after")
    assert str(tmp_path / "after" / "checkpoint-1") == again.state.best_model_checkpoint
    fresh = mesh_runs.trainer(str(tmp_path / "fresh"), [], "qwen3")
    native.load_model(fresh.model, tmp_path / "after" / "checkpoint-1" / "native")
    for name, tensor in mesh_runs.weights(fresh.model).items():
        assert torch.equal(mesh_runs.weights(again.model)[name], tensor), name


def test_two_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before it clears anything; one that saves nothing goes on, and clears nothing either."""
    told: list[str] = []
    monkeypatch.setattr(output, "PATIENCE", 0.0)

    def others(step: int) -> None:
        if step == 1:
            (tmp_path / STAGING / "theirs").mkdir(parents=True)
            with pytest.raises(ConfigError) as caught:
                mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()
            told.append(str(caught.value))
            mesh_runs.trainer(str(tmp_path), [], "qwen3", save_strategy="no", max_steps=1).train()
            clear_staging(tmp_path)
            assert (tmp_path / STAGING / "theirs").is_dir()

            class Save(TrainerCallback):  # type: ignore[misc]
                def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                    control.should_save = True

            late = mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[Save()], save_strategy="no", max_steps=1)
            with pytest.raises(ConfigError, match="another run is writing its checkpoints"):
                late.train()

    mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[AtStep(others)], **SAVING, max_steps=2).train()
    assert [
        f"output_dir: another run is writing its checkpoints to {tmp_path}; use another folder, or wait for it"
    ] == told
    assert ["checkpoint-1", "checkpoint-2"] == listing(tmp_path)
    assert not (tmp_path / LOCK).exists()
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()
    assert not (tmp_path / STAGING).exists()


def test_a_save_that_fails_ends_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the place, the reason and what to do; the checkpoint before is kept."""
    write = background.write

    def second_fails(tensors: Any, folder: Path, group: Any) -> None:
        if folder.parent.name == "checkpoint-2":
            raise OSError(28, "No space left on device")
        write(tensors, folder, group)

    steps: list[int] = []
    monkeypatch.setattr(background, "write", second_fails)
    made = mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[AtStep(steps.append)], **SAVING)
    with pytest.raises(ConfigError) as caught:
        made.train()
    expected = f"{tmp_path / 'checkpoint-2'}: can't be saved: [Errno 28] No space left on device; make room on its disk"
    assert str(caught.value).startswith(expected)
    assert [0, 1, 2] == steps
    assert ["checkpoint-1"] == listing(tmp_path)
    assert not list((tmp_path / STAGING).glob("*"))


def test_the_model_alone_is_saved_where_that_was_asked_for(tmp_path: Path) -> None:
    """Its weights for a best model, the export for others; it can't be resumed, which is said."""
    mesh_runs.trainer(str(tmp_path), ["--tt_hf_export", "final"], "qwen3", **SAVING, save_only_model=True, max_steps=1).train()  # fmt: skip
    folder = tmp_path / "checkpoint-1"
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "native" / "optimizer.json").exists()
    found = damage(folder)
    assert found is not None
    assert "it holds the model alone (save_only_model)" in found.message


def test_with_the_final_export_alone_a_checkpoint_holds_what_a_resume_needs(tmp_path: Path) -> None:
    """And nothing more; it resumes and is the best model like any other."""
    words = ["--tt_hf_export", "final"]
    made = mesh_runs.trainer(str(tmp_path), words, "qwen3", **SAVING, max_steps=2)
    made.train()
    assert {
        "native", "scheduler.pt", "rng_state.pth", "trainer_state.json", "torchturbo.yaml", "torchturbo_run.json",
    } == {path.name for path in (tmp_path / "checkpoint-1").iterdir()}  # fmt: skip
    made.save_model()
    assert (tmp_path / "model.safetensors").is_file()
    again = mesh_runs.trainer(f"{tmp_path}-again", words, "qwen3", max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert mesh_runs.history(made) == mesh_runs.history(again)


def test_what_is_pushed_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload goes on from the folder it was begun in, so that one has its name and its state from the start."""
    from transformers import Trainer

    pushed: dict[str, bool] = {}

    def push(self: Any, folder: str) -> None:
        native.load_model(self.model, Path(folder) / "native")
        pushed[Path(folder).name] = (Path(folder) / "model.safetensors").is_file()

    for name, function in (("_push_from_checkpoint", push), ("init_hf_repo", None), ("_finish_current_push", None)):
        monkeypatch.setattr(Trainer, name, function or (lambda self, *args, **kwargs: None))
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=2, push_to_hub=True).train()
    assert {"checkpoint-1": True, "checkpoint-2": True} == pushed
    assert all(damage(tmp_path / name) is None for name in pushed)


def test_random_states_of_other_ranks_are_told_once(tmp_path: Path, logged: list[str]) -> None:
    """Nothing else shows that dropout draws differ."""
    mesh_runs.trainer(str(tmp_path), [], "qwen3", **SAVING, max_steps=1).train()
    record = tmp_path / "checkpoint-1" / "torchturbo_run.json"
    record.write_text(record.read_text().replace('"world_size": 1', '"world_size": 2'))
    again = mesh_runs.trainer(f"{tmp_path}-again", ["--tt_resume_allow", "max_steps"], "qwen3", max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    told = [line for line in logged if "holds the random states of 2 ranks, this run has 1" in line]
    assert 1 == len(told), logged


def test_shards_are_on_the_disk_when_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of them is synced: a name would otherwise outlive a power cut, and its contents not."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    native.save(native.State({"model": {"weight": torch.ones(3)}}), tmp_path / "native")

    assert "__0_0.distcp" in synced


def test_only_the_best_is_left_where_one_is_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer removes the others at the end, when the last one has its name, too."""
    monkeypatch.setattr(background.Background, "poll", lambda self: None)  # the writer is never done before the end

    class First(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.best_global_step, state.best_metric = 1, 0.0

    made = mesh_runs.trainer(str(tmp_path), [], "qwen3", callbacks=[First()], **SAVING, max_steps=3, save_total_limit=1)
    made.train()

    assert ["checkpoint-1"] == listing(tmp_path)
