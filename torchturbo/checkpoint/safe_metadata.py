"""The index of a native checkpoint (DCP's ``.metadata``), read without running anything that a file brings along.

torch reads it with ``pickle.load``, which calls whatever a pickle names. Here the names are held against a list, and
none of them is given out itself: stand-ins take the place of DCP's classes while the file is read, and the index is
built from them afterwards, with every field checked.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX_NAME = ".metadata"
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Names that DCP gives to the files with the tensors."""
CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)
"""What an index of tensors names; anything else in its place is refused."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class _StandIn:
    """What an object of the file is while it is read: nothing but its state."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Take the arguments that a pickle calls a class with."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in that belongs to this file alone: a pickle can set attributes of what it is given."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._made.setdefault((module, name), type(name, (_StandIn,), {}))


def read_index(folder: Path) -> Metadata:
    """Return the index of the DCP checkpoint in a folder.

    Raises
    ------
    OSError
        If it can't be read.
    pickle.UnpicklingError
        If it holds anything but an index of tensors that lie in this folder.

    """
    with open(folder / INDEX_NAME, "rb") as file:
        try:
            return _index(_Unpickler(file).load())
        except OSError:
            raise
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # the unpickler meets broken bytes with errors of many kinds
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


def _fields(made: Any, name: str) -> Mapping[str, Any]:
    if type(made).__name__ != name or not isinstance(made, _StandIn) or not isinstance(made.state, dict):
        raise pickle.UnpicklingError(f"expected {name}, got {type(made).__name__}")
    return made.state


def _index(made: Any) -> Metadata:
    fields = _fields(made, "Metadata")
    tensors = {_text(name): _tensor(entry) for name, entry in fields["state_dict_metadata"].items()}
    places = dict(_place(index, info) for index, info in fields["storage_data"].items())
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise pickle.UnpicklingError(f"it does not say where {name} is")
    return Metadata(tensors, planner_data={}, storage_data=places)  # type: ignore[arg-type]


def _tensor(made: Any) -> TensorStorageMetadata:
    fields = _fields(made, "TensorStorageMetadata")
    size = _numbers(fields["size"])
    properties = fields["properties"]
    if type(properties).__name__ != "TensorProperties" or not isinstance(properties.state[0], torch.dtype):
        raise pickle.UnpicklingError("a tensor of no known number format")
    chunks = []
    for chunk in fields["chunks"]:
        parts = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_numbers(parts["offsets"]), _numbers(parts["sizes"])))
    if not _is_whole(size, chunks):
        raise pickle.UnpicklingError("a tensor whose parts do not make a whole")
    return TensorStorageMetadata(TensorProperties(properties.state[0]), size, chunks)


def _is_whole(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether chunks make up a tensor: each element is in one of them, and in no other.

    Shards on a mesh are the cells of a grid. So each dimension is cut at the same places for all of them, and there are
    as many different ones as the grid has cells; comparing each with each other would take long for many ranks. Chunks
    without an element are of ranks that got none.
    """
    filled = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks if prod(chunk.sizes) > 0]
    cells = set(filled)
    if len(cells) != len(filled) or any(len(cell) != len(size) for cell in cells):
        return False
    if not prod(size):
        return not cells
    for at, length in enumerate(size):
        end = 0
        for offset, extent in sorted({cell[at] for cell in cells}):
            if offset != end:
                return False
            end += extent
        if end != length:
            return False
    return len(cells) == prod(len({cell[at] for cell in cells}) for at in range(len(size)))


def _place(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    key, value = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    name, (offset, length) = _text(value["relative_path"]), _numbers((value["offset"], value["length"]))
    if not DATA_FILE.fullmatch(name):
        raise pickle.UnpicklingError(f"it names {name!r}, which is no data file of this folder")
    if value.get("transform_descriptors"):
        raise pickle.UnpicklingError("its tensors are transformed, which is not written here")
    return MetadataIndex(_text(key["fqn"]), _numbers(key["offset"])), _StorageInfo(name, offset, length)


def _numbers(values: Any) -> torch.Size:
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
        raise pickle.UnpicklingError("a size that is none")
    return torch.Size(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise pickle.UnpicklingError("a name that is no text")
    return value
