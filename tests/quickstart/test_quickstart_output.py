"""The output folder: never a mixture of two runs, never a remainder of a failed one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from torchturbo.engine.config import load_config
from torchturbo.errors import BAD_INPUT
from torchturbo.quickstart.errors import QuickstartError
from torchturbo.quickstart.output import RECORD, Output


def finished(folder: Path) -> Output:
    output = Output.claim(folder, 1)
    output.write_inputs({})
    output.keep()
    return output


def test_absent_and_empty_folders_are_taken(tmp_path: Path) -> None:
    assert Output.claim(tmp_path / "a" / "b", 1).folder == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert Output.claim(tmp_path / "empty", 1).folder == tmp_path / "empty"


def test_another_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "run").folder.name for _ in range(3)]
    assert folders == ["run", "run-2", "run-3"]


def test_a_run_that_starts_at_the_same_moment_stays_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Output.claim(tmp_path / "run", 1)
    record = (first.folder / RECORD).read_bytes()
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as both saw it a moment ago
    assert Output.claim(tmp_path / "run", 1).folder.name == "run-2"
    assert (first.folder / RECORD).read_bytes() == record


def test_the_working_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert [Output.claim(Path("."), 1).folder.name for _ in range(2)] == ["work", "work-2"]


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(QuickstartError, match="is not empty and no earlier quickstart made it; choose") as caught:
        Output.claim(tmp_path, 1)
    assert caught.value.status == BAD_INPUT
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["file", "file/deeper/folder"])
def test_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuickstartError, match=r"file, not a folder; choose another folder with --output_dir") as caught:
        Output.claim(tmp_path / name, 1)
    assert caught.value.status == BAD_INPUT


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who runs CI, may write anywhere
    with pytest.raises(QuickstartError, match=r"cannot write to .*run \(Permission denied\); choose"):
        Output.claim(tmp_path / "run", 1)
    assert not list(tmp_path.iterdir())


def test_a_name_that_no_file_may_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuickstartError, match="cannot write to"):
        Output.claim(tmp_path / ("x" * 300), 1)


def test_too_small_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuickstartError, match=r"the run writes 1000000\.0 GB to .*are free"):
        Output.claim(tmp_path / "run", 10**15)
    assert not list(tmp_path.iterdir())


def test_discard_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    output = Output.claim(tmp_path / "a" / "b", 1)
    output.write_inputs({})
    output.model.mkdir()
    (output.model / "model.safetensors").write_text("half")
    output.discard()
    assert not list(tmp_path.iterdir())


def test_discard_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    output = Output.claim(tmp_path / "empty", 1)
    output.write_inputs({})
    (output.folder / "notes.txt").write_text("the user's, written meanwhile")
    output.discard()
    assert [path.name for path in output.folder.iterdir()] == ["notes.txt"]


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    output = finished(tmp_path / "run")
    output.discard()
    assert (output.folder / RECORD).is_file()


def test_the_configuration_is_right_and_commented(tmp_path: Path) -> None:
    config = load_config(str(finished(tmp_path / "run").config))
    assert (config.mixed_precision, config.gbs, config.activation_checkpointing.enabled) == ("fp32", 1, False)
    assert config.origin("gbs").place.endswith("turbo.yaml:4:6")
