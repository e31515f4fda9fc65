"""Fingerprints of a checkpoint's files: their size, and a digest of their ends, which costs the same for any model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

ENDS = 1 << 20
"""Bytes from each end of a file that its digest covers.

The start of a safetensors file holds every tensor's name, shape and place, the end of a .pt file (a zip) the CRC-32 of
every tensor in it: a file that is cut off, rewritten, or another checkpoint's differs there. Flipped bits inside a large
safetensors file are not found; the whole file's digest would take minutes for large models, at each save.
"""
READ_BY_A_RESUME = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    "torchturbo.yaml",
)
"""Files of a checkpoint that decide how a run goes on."""
NATIVE_STATE = "native/*"
EXPORTED = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Weights that no resume reads where there is a native state."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Return ``size`` in bytes and ``sha256`` of a file's two ends, which for files up to 2 MiB are all of it.

    Raises
    ------
    OSError
        If it can't be read.
    """
    digest = sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(ENDS))
        file.seek(max(ENDS, size - ENDS))
        digest.update(file.read(ENDS))
    return {"size": size, "sha256": digest.hexdigest()}


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of the files in a checkpoint folder that a resume reads, by name."""
    patterns = [*READ_BY_A_RESUME, NATIVE_STATE]
    if any(True for _ in folder.glob(NATIVE_STATE)):
        patterns = [pattern for pattern in patterns if pattern not in EXPORTED]
    found = (path for pattern in patterns for path in folder.glob(pattern))
    paths = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    return {name: fingerprint(paths[name]) for name in sorted(paths)}


def is_name(text: str) -> bool:
    """Return whether a text names something inside a folder, and nothing beside or below that."""
    return text not in ("", ".", "..") and Path(text).name == text


def changed_file(folder: Path, recorded: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first file that differs from its recorded fingerprint, and what is wrong with it; None if none does."""
    for name, expected in recorded.items():
        path = folder / name
        if not is_name(name.removeprefix("native/")) or not isinstance(expected, Mapping):
            continue  # a record by other hands: it says nothing of files elsewhere
        if not path.is_file():
            return name, "is missing"
        try:
            found = fingerprint(path)
        except OSError as error:
            return name, f"can't be read: {error.strerror or error}"
        if found["size"] != expected.get("size"):
            return name, f"is damaged: expected {expected.get('size')} bytes, got {found['size']}"
        if found["sha256"] != expected.get("sha256"):
            return name, "is not the file that was saved: its sha256 is another one"
    return None
