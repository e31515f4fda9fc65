"""The user's cache: folders that are complete or absent, whoever is interrupted and however many run at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torchturbo.quickstart.errors import QuickstartError, readable_size, refused

MARKER = "torchturbo_complete.json"
"""Written last: the size and SHA-256 of every other file of a complete folder."""
SCRATCH = "unfinished-"
CHUNK = 1 << 20
REMEDY = "set XDG_CACHE_HOME to a folder that you can write to"


def cache_folder(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Return where TorchTurbo keeps downloads: ``$XDG_CACHE_HOME/torchturbo``, else ``~/.cache/torchturbo``.

    On Windows, where that variable is not set, ``%LOCALAPPDATA%\\torchturbo``. A relative path in
    ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification demands.
    """
    chosen = environ.get("XDG_CACHE_HOME", "")
    if chosen and Path(chosen).is_absolute():
        return Path(chosen) / "torchturbo"
    local = environ.get("LOCALAPPDATA", "")
    if platform == "win32" and local:
        return Path(local) / "torchturbo"
    try:
        return Path.home() / ".cache" / "torchturbo"
    except RuntimeError:
        raise QuickstartError("this user has no home folder to keep the model in", REMEDY) from None


def open_cache(folder: Path, needed: int) -> None:
    """Make sure that the cache exists, can be written to, and has room for ``needed`` more bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise refused(folder, error, REMEDY) from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise QuickstartError(
            f"preparing the model needs {readable_size(needed)} in {folder}, {readable_size(free)} are free",
            "free some space, or set XDG_CACHE_HOME to a folder on another disk",
        )


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the cache for this process alone; the operating system lets go of it if the process dies.

    ``on_wait`` is called once if another process holds it.
    """
    from filelock import FileLock, Timeout  # torch and transformers both depend on it

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    except OSError as error:
        raise refused(folder, error, REMEDY) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Give a folder for unfinished work beside the finished, and remove what is left of it."""
    work = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes left behind; only for the holder of the lock."""
    for left in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def publish(made: Path, final: Path) -> None:
    """Move a finished file or folder to its place in one step; what stands there goes first."""
    if made.is_file() or not final.exists():
        os.replace(made, final)
        return
    # A folder cannot be replaced in one step: move the old one aside, into a place that sweep() knows.
    with scratch(final.parent) as aside:
        os.replace(final, aside / final.name)
        os.replace(made, final)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, source: str) -> None:
    """Mark a folder as complete: made from ``source``, with these files."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }
    text = json.dumps({"source": source, "files": files}, indent=2) + "\n"
    (folder / MARKER).write_text(text, encoding="utf-8")


def flaw(folder: Path, source: str) -> str | None:
    """Return what is wrong with a folder that :func:`seal` marked, or None if every byte is as it was."""
    if not folder.is_dir():
        return "absent"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if marker["source"] != source:
            return "made from another file"
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in marker["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "incomplete"
    return next((reason for name, entry in files.items() if (reason := _file_flaw(folder, name, *entry))), None)


def _file_flaw(folder: Path, name: str, size: int, sha256: str) -> str | None:
    path = folder / name
    with suppress(OSError):
        if path.stat().st_size != size:
            return f"{name} has another size"
        return None if file_sha256(path) == sha256 else f"{name} has changed"
    return f"{name} is missing"
