"""The cache: where it is, and that a folder in it is complete or absent."""

from __future__ import annotations

import errno
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchturbo.quickstart import cache
from torchturbo.quickstart.errors import QuickstartError


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"XDG_CACHE_HOME": "/data/cache"}, "linux", Path("/data/cache/torchturbo")),
        ({"XDG_CACHE_HOME": "relative"}, "linux", Path.home() / ".cache/torchturbo"),
        ({"XDG_CACHE_HOME": ""}, "darwin", Path.home() / ".cache/torchturbo"),
        ({"LOCALAPPDATA": "/c/local"}, "win32", Path("/c/local/torchturbo")),
        ({"LOCALAPPDATA": "/c/local"}, "linux", Path.home() / ".cache/torchturbo"),
    ],
)
def test_place(environ: dict[str, str], platform: str, expected: Path) -> None:
    assert cache.cache_folder(environ, platform) == expected


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(QuickstartError, match="no home folder.*; set XDG_CACHE_HOME"):
        cache.cache_folder({}, "linux")


def sealed(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"abc")
    (folder / "inner" / "b").write_bytes(b"def")
    cache.seal(folder, "source")
    return folder


def test_seal_names_each_file(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "made")
    files = json.loads((folder / cache.MARKER).read_text())["files"]
    assert files["inner/b"] == {
        "bytes": 3,
        "sha256": "cb8379ac2098aa165029e3938a51da0bcecfc008fd6795f401178647f96c5b34",
    }
    assert cache.flaw(folder, "source") is None


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "weights").write_bytes(b"abd"), "weights has changed"),
        (lambda folder: (folder / "weights").write_bytes(b"ab"), "weights has another size"),
        (lambda folder: (folder / "inner" / "b").unlink(), "inner/b is missing"),
        (lambda folder: (folder / cache.MARKER).unlink(), "incomplete"),
        (lambda folder: (folder / cache.MARKER).write_text("{"), "incomplete"),
        (lambda folder: (folder / cache.MARKER).write_text("[]"), "incomplete"),
        (lambda folder: (folder / cache.MARKER).write_text('{"source": "source", "files": {"a": 1}}'), "incomplete"),
    ],
)
def test_every_damage_is_seen(tmp_path: Path, damage, expected: str) -> None:
    folder = sealed(tmp_path / "made")
    damage(folder)
    assert cache.flaw(folder, "source") == expected


def test_another_source_and_absence_are_flaws(tmp_path: Path) -> None:
    assert cache.flaw(sealed(tmp_path / "made"), "newer") == "made from another file"
    assert cache.flaw(tmp_path / "nothing", "source") == "absent"


def test_publish_replaces_folder_file_and_absence(tmp_path: Path) -> None:
    for number, before in enumerate((None, "folder", "file")):
        final = tmp_path / f"final{number}"
        if before == "folder":
            sealed(final)
        elif before == "file":
            final.write_text("in the way")
        made = tmp_path / "made"
        made.mkdir()
        (made / "new").write_text("new")
        cache.publish(made, final)
        assert [path.name for path in final.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"final0", "final1", "final2"}


def test_scratch_is_removed_when_work_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), cache.scratch(tmp_path) as work:
        (work / "half").write_text("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_sweep_removes_only_unfinished_work(tmp_path: Path) -> None:
    sealed(tmp_path / "model")
    (tmp_path / f"{cache.SCRATCH}x" / "deep").mkdir(parents=True)
    cache.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_too_little_space_is_said_in_numbers(tmp_path: Path) -> None:
    with pytest.raises(QuickstartError, match=r"needs 1000000\.0 GB in .*, [\d.]+ .B are free; free some space"):
        cache.open_cache(tmp_path / "new", 10**15)


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuickstartError, match="cannot write to .*file/cache.*; set XDG_CACHE_HOME"):
        cache.open_cache(tmp_path / "file" / "cache", 1)


def test_a_read_only_cache_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)  # root, who runs CI, may write anywhere
    with pytest.raises(QuickstartError, match="Permission denied.*; set XDG_CACHE_HOME"):
        cache.open_cache(tmp_path, 1)


def hold(folder: Path, held: object, release: object) -> None:
    with cache.locked(folder, lambda: None):
        held.set()
        release.wait(120)


def test_the_second_process_waits_and_says_so(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, held, release))
    other.start()
    assert held.wait(120)
    waits: list[float] = []

    def on_wait() -> None:
        waits.append(time.monotonic())
        release.set()

    with cache.locked(tmp_path, on_wait):
        assert len(waits) == 1
    other.join(120)
    assert other.exitcode == 0


def test_a_killed_process_lets_go_of_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchturbo.quickstart import cache\n"
        "with cache.locked(Path(sys.argv[1]), lambda: None): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    with cache.locked(tmp_path, lambda: pytest.fail("the dead process still holds the lock")):
        pass
