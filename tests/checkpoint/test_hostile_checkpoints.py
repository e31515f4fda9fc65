"""Checkpoints and output folders from hostile hands: an error with its place, no code run, no last good state lost."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.damage import damage
from torchturbo.checkpoint.files import STAGING, clear_staging, publish_folder, put_back, staging_folder
from torchturbo.checkpoint.fingerprints import ENDS, READ_BY_A_RESUME, changed_file, fingerprint, fingerprints
from torchturbo.checkpoint.record import MANIFEST_NAME
from torchturbo.errors import ConfigError
from torchturbo.train.run import train


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder and rows."""
    folder = tmp_path_factory.mktemp("material")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(8))
    return folder


def command(material: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"), "--save_steps", "1",
        "--output_dir", str(output), "--max_steps", "3", "--per_device_train_batch_size", "2", "--use_cpu", *words,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 1, 2 and 3."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(command(material, out))
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run, whose newest checkpoint a test spoils."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


def refused(material: Path, out: Path, name: str = "checkpoint-3") -> str:
    """Return what a resume says; it writes nothing."""
    before = listing(out)
    with pytest.raises(ConfigError) as caught:
        train(command(material, out, "--resume_from_checkpoint", str(out / name)))
    assert before == listing(out)
    return str(caught.value)


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def resumes(material: Path, out: Path, logged: Sequence[str], expected: str) -> None:
    """Check that "newest" goes on from the last good checkpoint to the end."""
    result = train(command(material, out, "--resume_from_checkpoint", "true"))
    assert 3 == result.steps
    assert any(expected in line for line in logged if "resuming from" in line or "is the end of" in line), logged


def unrecorded(folder: Path) -> Path:
    """Take the record away: a checkpoint of another trainer, which can be judged by its shape alone."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    return folder


def by_trainer(folder: Path) -> Path:
    """Make a checkpoint one of Trainer's own: whole weights, the optimizer's state in a pickle, no record."""
    shutil.rmtree(folder / "native")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    return unrecorded(folder)


# ---- files that are cut off, swapped, garbage, missing ----

NATIVE = ("native/.metadata", "native/__0_0.distcp", "native/optimizer.json")
FILES = (*NATIVE, "scheduler.pt", "rng_state.pth", "trainer_state.json", "torchturbo.yaml")
SPOILERS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_spoilt_file_is_named(name: str, spoiler: str, out: Path) -> None:
    """By what was recorded of it."""
    folder = out / "checkpoint-3"
    assert damage(folder) is None
    SPOILERS[spoiler](folder / name)
    found = damage(folder)
    assert found is not None
    assert name in found.message or spoiler == "missing"


@pytest.mark.parametrize("name", [name for name in FILES if name != "torchturbo.yaml"])
@pytest.mark.parametrize("spoiler", ["empty", "cut off", "garbage"])
def test_without_a_record_a_spoilt_file_is_named_by_its_shape(name: str, spoiler: str, out: Path) -> None:
    """As far as a look at it tells."""
    folder = unrecorded(out / "checkpoint-3")
    assert damage(folder) is None
    SPOILERS[spoiler](folder / name)
    found = damage(folder)
    assert found is not None
    assert found.message.startswith(f"{name} ")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("spoiler", ["empty", "cut off", "garbage"])
def test_a_spoilt_file_of_trainers_is_named(name: str, spoiler: str, out: Path) -> None:
    """A checkpoint that Trainer itself wrote, by its shape."""
    folder = by_trainer(out / "checkpoint-3")
    assert damage(folder) is None
    SPOILERS[spoiler](folder / name)
    found = damage(folder)
    assert found is not None
    assert found.message.startswith(f"{name} ")


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_file_of_another_step_is_found(name: str, out: Path) -> None:
    """Same size, same shape, another checkpoint's contents."""
    folder = out / "checkpoint-3"
    shutil.copy(out / "checkpoint-2" / name, folder / name)
    same = json.loads((folder / MANIFEST_NAME).read_text())["files"][name] == fingerprint(folder / name)
    found = damage(folder)
    assert same or (found is not None and found.message.startswith(f"{name} is "))
    assert not same or name == "rng_state.pth"  # nothing drew a number between the two steps


def test_the_last_good_checkpoint_is_still_resumed(material: Path, out: Path, logged: list[str]) -> None:
    """After the newest two were spoilt in different ways."""
    SPOILERS["cut off"](out / "checkpoint-3" / "native" / "__0_0.distcp")
    shutil.copy(out / "checkpoint-1" / "native" / ".metadata", out / "checkpoint-2" / "native" / ".metadata")
    resumes(material, out, logged, "checkpoint-1")
    passed = [line for line in logged if "is passed over" in line]
    expected = ["native/__0_0.distcp is damaged", "native/.metadata is not the file that was saved"]
    assert expected == [next(words for words in expected if words in line) for line in passed]


def test_a_refusal_names_the_place_and_writes_nothing(material: Path, out: Path) -> None:
    """The folder, the file, expected and found, the remedy."""
    size = (out / "checkpoint-3" / "native" / "__0_0.distcp").stat().st_size
    SPOILERS["cut off"](out / "checkpoint-3" / "native" / "__0_0.distcp")
    message = refused(material, out)
    assert f"checkpoint-3: native/__0_0.distcp is damaged: expected {size} bytes, got {size // 2}" in message
    assert message.endswith("use an older checkpoint")


STATES: tuple[Any, ...] = (
    [], 5, None, {}, {"global_step": "3"}, {"global_step": -1}, {"global_step": True}, {"global_step": 3, "unknown": 1},
    {"global_step": 3, "log_history": 4}, {"global_step": 3, "log_history": [4]},
)  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_state_of_another_shape_is_damaged(state: Any, out: Path) -> None:
    """Valid JSON that no Trainer wrote."""
    folder = unrecorded(out / "checkpoint-3")
    (folder / "trainer_state.json").write_text(json.dumps(state))
    found = damage(folder)
    expected = None if state == {} else "trainer_state.json is damaged"  # a state of nothing but defaults
    assert expected == (found and found.message)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"global_step": ' + "9" * 5_000 + "}", "\ud800"], ids=lambda t: t[:18]
)
def test_a_state_that_is_hard_to_read_is_damaged(text: str, out: Path) -> None:
    """Deep nesting, a number without end, bytes that are no text."""
    folder = unrecorded(out / "checkpoint-3")
    (folder / "trainer_state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "trainer_state.json is damaged" == getattr(damage(folder), "message", None)


@pytest.mark.parametrize("manifest", ["", "{", "[]", "5", "[" * 100_000, '{"run": 5}', '{"run": {}, "files": []}'])
def test_a_record_that_is_none(manifest: str, material: Path, out: Path) -> None:
    """It is an error of the record, not of the program."""
    (out / "checkpoint-3" / MANIFEST_NAME).write_text(manifest)
    if "{}" in manifest:
        train(command(material, out, "--resume_from_checkpoint", str(out / "checkpoint-3")))
    else:
        assert f"{MANIFEST_NAME}: can't be read" in refused(material, out)


# ---- names that lead elsewhere ----


def test_a_record_says_nothing_of_files_elsewhere(tmp_path: Path) -> None:
    """Names with a folder in them are not opened."""
    recorded = {"../x": {"size": 1}, "/etc/passwd": {"size": 1}, "a/b": {"size": 1}, "..": {"size": 1}, "x": 5}
    assert changed_file(tmp_path, recorded) is None


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_that_points_out_of_its_folder(name: str, material: Path, out: Path, tmp_path: Path) -> None:
    """As a checkpoint and as a model; nothing there is opened."""
    folder = by_trainer(out / "checkpoint-3")
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    expected = f"model.safetensors.index.json names {name!r}, which is no file of this folder"
    assert expected in refused(material, out)

    with pytest.raises(ConfigError, match="which is no file of this folder"):
        train([*command(material, tmp_path / "new"), "--model_name_or_path", str(folder)])
    assert not (tmp_path / "new").exists()


def test_an_index_that_names_what_is_missing_or_is_none(out: Path) -> None:
    """Two more ways to be wrong."""
    folder = by_trainer(out / "checkpoint-3")
    index = folder / "model.safetensors.index.json"
    for text, words in (
        ('{"weight_map": {"a": "b.safetensors"}}', "names b.safetensors, which is missing"),
        ('{"weight_map": ["a"]}', "is damaged"),
        ("x", "is damaged"),
    ):
        index.write_text(text)
        assert f"{index.name} {words}" == getattr(damage(folder), "message", None)


def test_links_within_reason_are_read(material: Path, out: Path, tmp_path: Path, logged: list[str]) -> None:
    """The Hub's cache consists of links to files, and people link checkpoints to larger disks."""
    elsewhere = tmp_path / "elsewhere"
    shutil.move(out / "checkpoint-3", elsewhere)
    (out / "checkpoint-3").symlink_to(elsewhere)
    tensors = elsewhere / "native" / "__0_0.distcp"
    (tmp_path / "blob").write_bytes(tensors.read_bytes())
    tensors.unlink()
    tensors.symlink_to(tmp_path / "blob")
    resumes(material, out, logged, "checkpoint-3")


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME])
def test_links_that_lead_nowhere_or_to_themselves(name: str, out: Path) -> None:
    """Named, not followed."""
    for target in ("gone", name):
        path = out / "checkpoint-3" / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        found = damage(out / "checkpoint-3")
        assert found is not None
        assert f"{name} is a link that leads nowhere" == found.message


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME, "model.safetensors.index.json", "scaler.pt"])
@pytest.mark.timeout(60)
def test_pipes_and_devices_are_not_waited_for(name: str, out: Path) -> None:
    """A pipe has no end, /dev/zero has none either."""
    path = out / "checkpoint-3" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{name} is no regular file" == getattr(damage(out / "checkpoint-3"), "message", None)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert f"{name} is no regular file" == getattr(damage(out / "checkpoint-3"), "message", None)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
@pytest.mark.timeout(60)
def test_a_model_folder_with_a_pipe(name: str, material: Path, tmp_path: Path) -> None:
    """No library may wait for it."""
    folder = Path(shutil.copytree(material / "model", tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="is no regular file"):
        train([*command(material, tmp_path / "out"), "--model_name_or_path", str(folder)])


@pytest.mark.parametrize("name", [*NATIVE, "trainer_state.json"])
def test_a_file_that_cannot_be_read(name: str, out: Path) -> None:
    """A test may run as root, which reads every file but one: the memory of a process, at its start."""
    path = out / "checkpoint-3" / name
    path.unlink()
    path.symlink_to("/proc/self/mem")
    found = damage(out / "checkpoint-3")
    assert found is not None
    assert found.message.startswith(f"{name} ")
    assert damage(unrecorded(out / "checkpoint-3")) is not None


# ---- pickles that run code ----


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


PICKLED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin", "adapter_model.bin", "scaler.pt")
NOT_LOADED = ("training_args.bin", "optimizer.bin", "rng_state_0.pth", "model.safetensors")
TEXTS = ("trainer_state.json", "torchturbo.yaml", MANIFEST_NAME, "config.json", *NATIVE)


def set_trap(path: Path, marker: Path, form: str) -> None:
    path.unlink(missing_ok=True)
    if form == "torch":
        archive = io.BytesIO()  # torch refuses to write to a name that begins with a dot
        torch.save({"state": {}, "param_groups": Trap(marker)}, archive)
        path.write_bytes(archive.getvalue())
    else:
        path.write_bytes(pickle.dumps(Trap(marker)))


@pytest.mark.parametrize("form", ["torch", "plain pickle"])
@pytest.mark.parametrize("name", [*PICKLED, *NOT_LOADED, *TEXTS])
def test_no_pickled_code_is_run(name: str, form: str, material: Path, out: Path, tmp_path: Path) -> None:
    """In whatever file it is put; with and without a record that would give it away."""
    for folder in (out / "checkpoint-3", unrecorded(out / "checkpoint-2")):
        set_trap(folder / name, tmp_path / "ran", form)
        try:
            train(command(material, out, "--resume_from_checkpoint", str(folder)))
        except ConfigError as error:
            assert name in str(error)
        else:
            assert name in (*NOT_LOADED, "torchturbo.yaml")  # which without a record is compared with nothing
        assert not (tmp_path / "ran").exists()
    assert "a pickle of that kind runs" and pickle.loads(pickle.dumps(Trap(tmp_path / "ran"))) is None
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_trap_is_named(name: str, material: Path, out: Path, tmp_path: Path) -> None:
    """Not as mere damage."""
    set_trap(unrecorded(out / "checkpoint-3") / name, tmp_path / "ran", "torch")
    expected = f"checkpoint-3: {name} holds other things than tensors and plain values, so it is not loaded"
    assert expected in refused(material, out)


@pytest.mark.parametrize("name", [*NATIVE, "scheduler.pt", "rng_state.pth"])
def test_a_trap_set_after_the_look_is_not_loaded(
    name: str, material: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between check and use nothing is trusted either: what loads is the restricted unpickler, and it is one line."""
    folder = out / "checkpoint-3"

    def swap(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = compared(self, *args, **kwargs)
        set_trap(folder / name, tmp_path / "ran", "torch")
        return found

    compared = TurboTrainer._checkpoint
    monkeypatch.setattr(TurboTrainer, "_checkpoint", swap)
    with pytest.raises(ConfigError) as caught:
        train(command(material, out, "--resume_from_checkpoint", str(folder), "--max_steps", "4", "--tt_resume_allow", "max_steps"))  # fmt: skip
    assert str(caught.value).startswith(f"{folder}: can't be loaded: ")
    assert 1 == len(str(caught.value).splitlines())
    assert not (tmp_path / "ran").exists()
    assert damage(out / "checkpoint-2") is None


def test_a_small_file_does_not_become_a_large_one(out: Path) -> None:
    """torch reads compressed archives too, and a kilobyte of zeros is a gigabyte of memory."""
    folder = unrecorded(out / "checkpoint-3")
    with zipfile.ZipFile(folder / "scheduler.pt") as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / "scheduler.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert "scheduler.pt is damaged" == getattr(damage(folder), "message", None)


# ---- fingerprints ----


def test_a_checkpoint_records_the_files_that_a_resume_reads(whole: Path) -> None:
    """Each with size and digest, and what is in the folder still has them."""
    folder = whole / "checkpoint-3"
    recorded = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    assert sorted(FILES) == sorted(recorded)
    assert fingerprints(folder) == recorded
    assert set(NATIVE) == {
        name for name in recorded if not any(Path(name).match(pattern) for pattern in READ_BY_A_RESUME)
    }


def test_a_file_that_was_changed_on_purpose(out: Path) -> None:
    """Without its entry in the record it is taken as it is; the others are still held against theirs."""
    folder = out / "checkpoint-3"
    (folder / "torchturbo.yaml").write_text((folder / "torchturbo.yaml").read_text() + "# a note\n")
    assert damage(folder) is not None
    record = json.loads((folder / MANIFEST_NAME).read_text())
    del record["files"]["torchturbo.yaml"]
    (folder / MANIFEST_NAME).write_text(json.dumps(record))
    assert damage(folder) is None
    SPOILERS["cut off"](folder / "native" / "__0_0.distcp")
    assert damage(folder) is not None


@pytest.mark.parametrize("size", [0, 1, ENDS, ENDS + 1, 2 * ENDS, 2 * ENDS + 1, 3 * ENDS])
def test_a_fingerprint_covers_both_ends(size: int, tmp_path: Path) -> None:
    """All of a file up to two mebibytes, the ends of a larger one, and always the size."""
    path = tmp_path / "file"
    data = bytearray(size)
    path.write_bytes(data)
    before = fingerprint(path)
    assert size == before["size"]
    for position in {0, size - 1, min(size, ENDS) - 1, max(0, size - ENDS)} if size else set():
        changed = bytearray(data)
        changed[position] = 1
        path.write_bytes(changed)
        assert before["sha256"] != fingerprint(path)["sha256"], position
    path.write_bytes(data + b"\0")
    assert before != fingerprint(path)


# ---- output folders ----


def test_an_output_folder_may_be_a_link(material: Path, tmp_path: Path) -> None:
    """People link it to a larger disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    train(command(material, tmp_path / "out", "--max_steps", "1"))
    assert damage(tmp_path / "disk" / "checkpoint-1") is None


@pytest.mark.parametrize("kind", ["a file", "a loop", "nowhere", "not ours", "a pipe"])
def test_an_output_folder_that_is_none(kind: str, material: Path, tmp_path: Path) -> None:
    """An error at the start, by its option."""
    path = tmp_path / "out"
    if kind == "a file":
        path.touch()
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "nowhere":
        path.symlink_to(tmp_path / "gone" / "away")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path = Path("/proc/torchturbo-out")  # no file system that files can be made in, not even by root
    with pytest.raises(ConfigError) as caught:
        train(command(material, path))
    assert all(problem.place == "--output_dir" for problem in caught.value.problems)


def test_staging_that_leads_elsewhere_is_not_followed(material: Path, tmp_path: Path) -> None:
    """A link in its place would have a run write, and tidy up, in another's folder."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    (theirs / "checkpoint-1.replaced").mkdir(parents=True)
    (theirs / "precious").touch()
    out.mkdir()
    (out / STAGING).symlink_to(theirs)
    train(command(material, out, "--max_steps", "1"))
    assert ["checkpoint-1.replaced", "precious"] == listing(theirs)
    assert damage(out / "checkpoint-1") is None
    assert not os.path.lexists(out / STAGING)


def test_leftovers_of_staging_are_cleared_and_links_in_them_not_followed(tmp_path: Path) -> None:
    """Files, folders and links of an interrupted or a hostile run."""
    theirs, staging = tmp_path / "theirs", staging_folder(tmp_path / "out")
    theirs.mkdir()
    (theirs / "precious").touch()
    staging.mkdir(parents=True)
    (staging / "checkpoint-9").symlink_to(theirs)
    (staging / "file").touch()
    clear_staging(tmp_path / "out")
    assert [] == listing(tmp_path / "out")
    staging.touch()  # a file in its place
    clear_staging(tmp_path / "out")
    assert [] == listing(tmp_path / "out")
    assert ["precious"] == listing(theirs)


def test_a_checkpoint_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    """Nor does removing old checkpoints."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.mkdir()
    (theirs / "precious").touch()
    for target in (theirs, out / "gone"):
        staged = staging_folder(out) / "checkpoint-1"
        staged.mkdir(parents=True)
        shutil.rmtree(out / "checkpoint-1", ignore_errors=True)
        (out / "checkpoint-1").symlink_to(target)
        publish_folder(staged, out / "checkpoint-1")
        assert not (out / "checkpoint-1").is_symlink()
        assert ["checkpoint-1"] == listing(out)
    assert ["precious"] == listing(theirs)
    put_back(out)


def test_overwriting_removes_a_linked_checkpoint_as_a_link(material: Path, out: Path, tmp_path: Path) -> None:
    """What it leads to stays, and the run goes on."""
    shutil.move(out / "checkpoint-2", tmp_path / "theirs")
    (out / "checkpoint-2").symlink_to(tmp_path / "theirs")
    train(command(material, out, "--overwrite_output_dir", "true", "--save_strategy", "no"))
    assert not list(out.glob("checkpoint-*"))
    assert damage(tmp_path / "theirs") is None


def test_a_lock_that_is_a_link_does_not_empty_what_it_leads_to(material: Path, tmp_path: Path) -> None:
    """The lock's file is opened for writing."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".torchturbo.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="--output_dir: .*torchturbo.lock"):
        train(command(material, tmp_path / "out"))
    assert "precious" == (tmp_path / "precious").read_text()


# ---- weights that lack some ----


def without_a_layer(folder: Path) -> None:
    """Take a layer out of a model's weights."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_that_lacks_a_layer_is_not_resumed(material: Path, out: Path) -> None:
    """Its layer would stay as the model was before training."""
    folder = unrecorded(out / "checkpoint-2")
    native_without(folder / "native", ".layers.1.")
    message = refused(material, out, "checkpoint-2")
    assert "its weights lack 9 of the model's: model.layers.1." in message


def native_without(folder: Path, part: str) -> None:
    """Write a native state anew without some of its tensors."""
    from torch.distributed.checkpoint import FileSystemReader, load, save

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items() if part not in name
    }
    load(tensors, checkpoint_id=folder, no_dist=True)
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    save(tensors, checkpoint_id=folder, no_dist=True)


def test_a_spoilt_export_does_not_keep_a_checkpoint_from_being_resumed(material: Path, out: Path, logged: list[str]) -> None:  # fmt: skip
    """It is for others: what is exact stands beside it."""
    SPOILERS["garbage"](out / "checkpoint-3" / "model.safetensors")
    resumes(material, out, logged, "checkpoint-3")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_a_model_that_lacks_a_layer_is_not_trained(changes: dict[str, Any], material: Path, tmp_path: Path) -> None:
    """Transformers would fill it with random numbers; a tied head is no missing weight."""
    folder = tiny.save(tmp_path / "model", **changes)
    words = ["--model_name_or_path", str(folder), "--save_strategy", "no", "--max_steps", "1"]
    train([*command(material, tmp_path / "whole"), *words])
    without_a_layer(folder)
    with pytest.raises(ConfigError, match="model lacks 9 of the model's weights: model.layers.1."):
        train([*command(material, tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_a_tied_checkpoint_is_resumed(material: Path, tmp_path: Path) -> None:
    """Its head is in no file."""
    words = ["--model_name_or_path", str(tiny.save(tmp_path / "model", tie_word_embeddings=True))]
    out = tmp_path / "out"
    train([*command(material, out), *words])
    shutil.rmtree(out / "checkpoint-3")
    result = train([*command(material, out), *words, "--resume_from_checkpoint", "true"])
    assert (3, True) == (result.steps, result.trained)
