"""The committed files are what the schema says, and every difference is found and shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import ROOT, python

import codegen.__main__ as command
from codegen.outputs import OUTPUTS

REMEDY = "run `nox -s codegen` and commit the result"


@pytest.fixture
def copy(tmp_path: Path, generated: dict[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a root with the committed files, where the command works without generating them again."""
    for name in ("schema", "generated"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "outputs", lambda source: generated)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


def test_the_committed_files_are_what_the_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The check of CI, as a test: nothing printed, status 0."""
    assert (0, "") == (command.main(["--check"]), capsys.readouterr().out)


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_the_text_does_not_depend_on_hash_seed_or_locale(seed: str) -> None:
    """Every interpreter writes the same bytes as the one that wrote the committed files."""
    done = python("-m", "codegen", "--check", cwd=ROOT, env={"PYTHONHASHSEED": seed, "LC_ALL": "C", "TZ": "UTC"})
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_every_generated_file_is_committed_and_no_other() -> None:
    """The list of outputs is the folder."""
    found = {
        path.relative_to(ROOT / "generated").as_posix()
        for path in (ROOT / "generated").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(OUTPUTS) == found


@pytest.mark.parametrize("name", OUTPUTS)
def test_removing_any_one_byte_is_found(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First, last and some byte between: exit status 1, a diff of that file, and the command to run."""
    path = copy / "generated" / name
    text = path.read_bytes()
    for position in (0, len(text) // 2, len(text) - 1):
        path.write_bytes(text[:position] + text[position + 1 :])
        assert 1 == command.main(["--check"])
        out, err = capsys.readouterr()
        assert f"--- generated/{name} (committed)\n+++ generated/{name} (from the schema)\n@@ " in out
        assert f"\n1 generated file is stale: {REMEDY}\n" == err
    path.write_bytes(text)
    assert 0 == command.main(["--check"])


def test_an_edited_default_is_shown_as_a_diff(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The diff goes from what is committed to what the schema says."""
    path = copy / "generated" / "config.py"
    path.write_text(path.read_text(encoding="utf-8").replace("sp_size: int = 1", "sp_size: int = 2"), encoding="utf-8")
    assert 1 == command.main(["--check"])
    out = capsys.readouterr().out.splitlines()
    assert ["-    sp_size: int = 2", "+    sp_size: int = 1"] == [
        line for line in out if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]


def test_changed_line_endings_are_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison is of bytes."""
    path = copy / "generated" / "help.txt"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert 1 == command.main(["--check"])


def test_deleted_and_extra_files_are_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is a diff of all its lines; a file that nothing generates is named."""
    (copy / "generated" / "surface.json").unlink()
    (copy / "generated" / "docs" / "old.md").write_text("old", encoding="utf-8")
    assert 1 == command.main(["--check"])
    out, err = capsys.readouterr()
    assert '+ "inputs": [' in out
    assert "generated/docs/old.md: nothing generates this file\n" in out
    assert f"\n2 generated files are stale: {REMEDY}\n" == err


def test_the_check_annotates_files_on_github(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stale file gets its line in the review."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (copy / "generated" / "help.txt").unlink()
    assert 1 == command.main(["--check"])
    assert f"::error file=generated/help.txt,title=Stale generated file::{REMEDY}" in capsys.readouterr().out


def test_writing_repairs_all_of_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Edited, deleted and extra files are set right and named; a second run has nothing to do."""
    folder = copy / "generated"
    (folder / "surface.json").unlink()
    (folder / "help.txt").write_text("edited", encoding="utf-8")
    (folder / "old.txt").write_text("old", encoding="utf-8")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert 0 == command.main([])
    assert [
        "wrote generated/help.txt",
        "wrote generated/surface.json",
        "removed generated/old.txt, which nothing generates any more",
    ] == capsys.readouterr().out.splitlines()
    assert before["keys.py"] == (folder / "keys.py").stat().st_mtime_ns
    assert (0, 0, "") == (command.main([]), command.main(["--check"]), capsys.readouterr().out)


def test_the_check_writes_nothing(copy: Path) -> None:
    """It only looks."""
    path = copy / "generated" / "help.txt"
    path.write_text("edited", encoding="utf-8")
    command.main(["--check"])
    assert "edited" == path.read_text(encoding="utf-8")


def test_a_changed_schema_makes_the_committed_files_stale(checkout_of_a_changed_default: str) -> None:
    """A default changed in the schema alone fails the check, with the diff of every file that holds it."""
    for name in ("config.py", "keys.py", "surface.json", "help.txt", "docs/reference.md", "torchturbo.schema.json"):
        assert f"--- generated/{name} (committed)" in checkout_of_a_changed_default


@pytest.fixture
def checkout_of_a_changed_default(tmp_path: Path) -> str:
    for name in ("schema", "codegen", "generated", "torchturbo"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "schema" / "torchturbo.schema.json"
    text = path.read_text(encoding="utf-8")
    assert '"default": 1024' in text
    path.write_text(text.replace('"default": 1024', '"default": 2048'), encoding="utf-8")
    done = python("-m", "codegen", "--check", cwd=tmp_path, root=tmp_path)
    assert 1 == done.returncode, done.stderr
    return str(done.stdout)
