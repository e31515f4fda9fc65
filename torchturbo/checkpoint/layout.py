"""Names of what a checkpoint consists of."""

from __future__ import annotations

from pathlib import Path

NATIVE = "native"
"""Folder of a checkpoint with the state that a resume reads, in torch.distributed.checkpoint's format."""
OPTIMIZER_NAME = "optimizer.json"
"""What of the optimizer is no tensor, in that folder."""


def is_native(folder: Path) -> bool:
    """Return whether a checkpoint holds a native state, whole or not."""
    return (folder / NATIVE).is_dir()
