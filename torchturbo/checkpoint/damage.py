"""What keeps a checkpoint from being resumed, found by a look at each of its files; nothing in them is executed.

A look reads no tensor: the pickles of ``.pt`` files by torch's restricted unpickler, which makes tensors and plain
values alone, the index of a native state by :mod:`torchturbo.checkpoint.safe_metadata`, the headers of safetensors
files, the JSON. Files that the record knows are held against their fingerprints.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchturbo.checkpoint.fingerprints import READ_BY_A_RESUME, changed_file, is_name
from torchturbo.checkpoint.layout import NATIVE, OPTIMIZER_NAME, is_native
from torchturbo.checkpoint.record import MANIFEST_NAME, read_manifest
from torchturbo.errors import shorten

STATE_NAME = "trainer_state.json"
RESUMABLE = (STATE_NAME, "scheduler.pt")
"""What a checkpoint must hold, beside the optimizer's state, for the run to go on as it was."""
OPTIMIZERS = (f"{NATIVE}/{OPTIMIZER_NAME}", "optimizer.pt")
"""The optimizer's state, here and in a checkpoint of Trainer's own."""
MODEL_CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "pytorch_model*.bin", "adapter_model.bin", "scaler.pt")
OLDER = "use an older checkpoint"


class Damage(NamedTuple):
    """What is wrong with a checkpoint, and what to do."""

    message: str
    remedy: str = OLDER


def damage(folder: Path) -> Damage | None:
    """Return the first thing that keeps a checkpoint from being resumed; None where it is whole."""
    return next(_damages(folder), None)


def saved_step(folder: Path) -> int:
    """Return the optimizer step that a whole checkpoint was saved after."""
    return int(_json(folder / STATE_NAME)["global_step"])


def index_problem(folder: Path) -> str | None:
    """Return what is wrong with the indexes that name a model's weight files; names outside the folder are."""
    for path in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model.bin.index.json")]):
        try:
            names = set(_json(path)["weight_map"].values())
        except (KeyError, TypeError, AttributeError):
            return f"{path.name} is damaged"
        for name in sorted(map(str, names)):
            if not is_name(name):
                return f"{path.name} names {name!r}, which is no file of this folder"
            if not (folder / name).is_file():
                return f"{path.name} names {name}, which is missing"
    return None


def _damages(folder: Path) -> Iterator[Damage]:
    native = _files(folder / NATIVE, ("*",)) if is_native(folder) else []
    for path in [*_files(folder, (*READ_BY_A_RESUME, MANIFEST_NAME, MODEL_CONFIG, *PICKLES)), *native]:
        if not path.is_file():  # before anything opens it: a pipe would be waited for
            what = "is a link that leads nowhere" if path.is_symlink() and not path.exists() else "is no regular file"
            yield Damage(f"{path.relative_to(folder).as_posix()} {what}")
    has_optimizer = any((folder / name).is_file() for name in OPTIMIZERS)
    if not (has_optimizer and all((folder / name).is_file() for name in RESUMABLE)):
        message = "it holds the model alone (save_only_model): its optimizer and schedule can't go on"
        yield Damage(message, "start from it as a model: --model_name_or_path")
    if changed := changed_file(folder, _recorded(folder)):
        yield Damage(" ".join(changed))
    for path in _files(folder, PICKLES):
        if problem := _pickle_problem(path):
            yield Damage(f"{path.name} {problem}")
    if (folder / MODEL_CONFIG).is_file() and not isinstance(_json(folder / MODEL_CONFIG), dict):
        yield Damage(f"{MODEL_CONFIG} is damaged")
    if not _is_state(folder / STATE_NAME):
        yield Damage(f"{STATE_NAME} is damaged")
    if is_native(folder):
        if problem := native_problem(folder / NATIVE):
            yield Damage(problem)
        return  # what was exported beside it is read by no resume
    if not _files(folder, WEIGHTS):
        yield Damage("it holds no weights")
    if problem := index_problem(folder):
        yield Damage(problem)
    for path in _files(folder, ("*.safetensors",)):
        if problem := safetensors_problem(path):
            yield Damage(f"{path.name} {problem}")


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return what is in a folder under some names, of whatever kind it is, links that lead nowhere included."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if any(Path(name).match(pattern) for pattern in patterns)]


def _recorded(folder: Path) -> dict[str, Any]:
    files = (read_manifest(folder) or {}).get("files")
    return files if isinstance(files, dict) else {}


def _pickle_problem(path: Path) -> str | None:
    """Return what is wrong with a file that torch.save wrote, after reading all of it but the tensors' data."""
    import torch
    from transformers.trainer_pt_utils import safe_globals  # random states hold NumPy's arrays

    try:
        with zipfile.ZipFile(path) as archive:
            # torch stores, so that a small file can't become a large one in memory.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return "is damaged"
        with safe_globals():
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        return "holds other things than tensors and plain values, so it is not loaded"
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except Exception:  # the unpickler's and the archive reader's own errors are of many kinds
        return "is damaged"
    return None


def native_problem(folder: Path, *, optimizer: bool = True) -> str | None:
    """Return what is wrong with a native state, after reading its index and the sizes of its files.

    ``optimizer`` says whether it must hold the optimizer's settings.
    """
    from torchturbo.checkpoint.optimizer_state import read_options
    from torchturbo.checkpoint.safe_metadata import INDEX_NAME, read_index

    index_name = f"{NATIVE}/{INDEX_NAME}"
    if not (folder / INDEX_NAME).is_file():
        return f"{index_name} is missing"
    try:
        places = (read_index(folder).storage_data or {}).values()
    except pickle.UnpicklingError as error:
        return f"{index_name} is no index of tensors in this folder, so it is not loaded: {shorten(str(error), 100)}"
    except OSError as error:
        return f"{index_name} can't be read: {error.strerror or error}"
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            return f"{NATIVE}/{name} is missing"
        if (size := (folder / name).stat().st_size) < end:
            return f"{NATIVE}/{name} is damaged: expected {end} bytes or more, got {size}"
    try:
        if optimizer:
            read_options(folder)
    except (ValueError, OSError) as error:
        return f"{NATIVE}/{error}"
    return None


def _is_state(path: Path) -> bool:
    """Return whether a file is the state of a Trainer."""
    from transformers import TrainerState

    try:
        state = TrainerState(**_json(path))
    except TypeError:
        return False
    steps, history = state.global_step, state.log_history
    numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in (steps, state.max_steps))
    return numbers and steps >= 0 and isinstance(history, list) and all(isinstance(item, dict) for item in history)


def _json(path: Path) -> Any:
    """Return what a JSON file holds; None for one that can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def safetensors_problem(path: Path) -> str | None:
    """Return what is wrong with a safetensors file, after reading its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            return None
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except SafetensorError:
        return "is damaged"
