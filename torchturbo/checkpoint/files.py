"""Files and folders that appear whole or not at all: written beside their place and renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torchturbo.checkpoint.claims import PATIENCE, Claims

STAGING = ".torchturbo-saving"
"""Folder inside output_dir that holds what is being written; whatever lies there is no checkpoint yet."""

OUTGOING = ".replaced"
"""Suffix of a folder that is moved out of the way of a new one of its name."""


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole (UTF-8)."""
    write_with(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let a function write a file under a temporary name of the same suffix, then put it in its place."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def staging_folder(output_dir: Path) -> Path:
    """Return the folder in which checkpoints are written before they are renamed."""
    return output_dir / STAGING


def remove(path: Path) -> None:
    """Remove a folder or a file, as far as that can be done; of a link only the link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def publish_folder(staged: Path, place: Path) -> None:
    """Rename a finished folder into its place; a folder of that name gives way."""
    if os.path.lexists(place):
        outgoing = staged.parent / f"{place.name}{OUTGOING}"
        remove(outgoing)
        os.replace(place, outgoing)
        os.replace(staged, place)
        remove(outgoing)
    else:
        os.replace(staged, place)
    with suppress(OSError):  # another checkpoint is being written there
        staged.parent.rmdir()


def publish_files(staged: Path, folder: Path, *, replacing: Sequence[str] = ()) -> None:
    """Move every file of a finished folder into another one; the model's configuration, which names it, goes last.

    What matches a pattern of ``replacing`` and is not in the finished folder belongs to an older model and goes.
    """
    for pattern in replacing:
        for old in folder.glob(pattern):
            if not (staged / old.name).exists():
                remove(old)
    for source in sorted(staged.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
        if source.is_dir() or (folder / source.name).is_dir():
            remove(folder / source.name)  # a tokenizer's further templates; a folder can't replace one that holds files
        os.replace(source, folder / source.name)
    staged.rmdir()
    with suppress(OSError):
        staged.parent.rmdir()


def put_back(output_dir: Path) -> None:
    """Put back the folders that an interrupted run had moved away for ones it did not get to rename."""
    staging = staging_folder(output_dir)
    if staging.is_symlink():
        return  # none of ours: what lies where it leads is somebody else's
    for outgoing in staging.glob(f"*{OUTGOING}"):
        place = output_dir / outgoing.name.removesuffix(OUTGOING)
        if not os.path.lexists(place):  # the process ended between the two renames of publish_folder
            os.replace(outgoing, place)


def recover(output_dir: Path) -> None:
    """Put back what an interrupted run had moved away, unless a run is at work there, which moves it itself."""
    claims = Claims()
    if list(staging_folder(output_dir).glob(f"*{OUTGOING}")) and claims.take(output_dir, PATIENCE):
        try:
            put_back(output_dir)
        finally:
            claims.release()


def clear_staging(output_dir: Path) -> None:
    """Remove what an interrupted run left unfinished; what a run is writing right now stays."""
    claims = Claims()
    if os.path.lexists(staging_folder(output_dir)) and claims.take(output_dir):
        try:
            remove_staging(output_dir)
        finally:
            claims.release()


def remove_staging(output_dir: Path) -> None:
    """Remove what was left unfinished in a folder that the caller has claimed."""
    put_back(output_dir)
    remove(staging_folder(output_dir))


def sync(folder: Path) -> None:
    """Have the disk keep a folder's files, and the names in it and below, if the power goes; some systems can't."""
    for path in (*folder.rglob("*"), folder):
        sync_one(path)


def sync_one(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def file_names(folder: Path) -> frozenset[str]:
    """Return the files in a folder and below, by their names relative to it."""
    return frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
