"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchturbo.checkpoint.files import (
    clear_staging,
    publish_files,
    publish_folder,
    staging_folder,
    write_text,
    write_with,
)
from torchturbo.train.run import WEIGHT_FILES


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """And no temporary one."""
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def broken(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_with(path, broken)

    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_folder_that_was_moved_away_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed between the two renames loses neither the old checkpoint nor its way back to it."""
    staged, place = staging_folder(tmp_path) / "checkpoint-2", tmp_path / "checkpoint-2"
    for folder, name in ((staged, "new"), (place, "old")):
        folder.mkdir(parents=True)
        (folder / name).write_text("")
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if source == staged:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(staged, place)
    monkeypatch.undo()
    assert not place.exists()

    clear_staging(tmp_path)

    assert names(tmp_path) == ["checkpoint-2/old"]


def test_a_folder_replaces_one_of_its_name(tmp_path: Path) -> None:
    """A resumed run writes the same step again."""
    staged, place = staging_folder(tmp_path) / "checkpoint-2", tmp_path / "checkpoint-2"
    for folder, name in ((staged, "new"), (place, "old")):
        folder.mkdir(parents=True)
        (folder / name).write_text("")

    publish_folder(staged, place)

    assert names(tmp_path) == ["checkpoint-2/new"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_files_and_folders_go_into_a_folder_that_has_others(tmp_path: Path) -> None:
    """The newer win, the others stay."""
    staged = staging_folder(tmp_path) / "final"
    for path in (
        staged / "config.json",
        staged / "templates" / "new",
        tmp_path / "templates" / "old",
        tmp_path / "kept",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path.parent.name))

    publish_files(staged, tmp_path)

    assert names(tmp_path) == ["config.json", "kept", "templates/new"]
    assert not staging_folder(tmp_path).exists()


def test_a_draft_goes_with_the_older_model_that_it_belongs_to(tmp_path: Path) -> None:
    """A run without heads into the folder of one with some leaves no draft beside a target that it is not for."""
    staged, out = staging_folder(tmp_path) / "final", tmp_path
    for path in (staged / "config.json", staged / "model.safetensors", out / "dspark" / "config.json", out / "notes"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)

    publish_files(staged, out, replacing=WEIGHT_FILES)

    assert ["config.json", "model.safetensors", "notes"] == names(out)
    assert not (out / "dspark").exists()
