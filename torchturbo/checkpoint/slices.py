"""Reading parts of tensors from safetensors files: slices, and what stacks, joins, cuts or transposes them.

A :class:`Source` is a tensor that is not there yet. It knows its shape, and fills any region of itself into a given
tensor by reading no more of the files than that region needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open

Region = tuple[tuple[int, int], ...]
"""First index and the one after the last, for each dimension of a tensor."""

FORMATS: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""The number formats of safetensors files, https://github.com/huggingface/safetensors#format."""


class Stored(NamedTuple):
    """What a file's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for a format that torch has not."""


def headers(files: Iterable[Path]) -> dict[str, Stored]:
    """Return what the files hold, by the tensors' names; reads no tensor."""
    found: dict[str, Stored] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
                part = file.get_slice(name)
                found[name] = Stored(path, tuple(part.get_shape()), FORMATS.get(part.get_dtype()))
    return found


@dataclass
class Reader:
    """Reads regions of the tensors in some files, and counts what it read.

    The files are mapped into memory: of a region's bytes only the pages they lie on are read, and ranks on one node
    share them.
    """

    stored: Mapping[str, Stored]
    bytes_read: int = 0
    """All bytes of the regions that were read."""
    most_at_once: int = 0
    """The most bytes of tensors that one source made whole, see :class:`Converted`, or that one read gave."""
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor, in the format that the file has it in."""
        path = self.stored[name].file
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        part = self._open[path].get_slice(name)
        read: torch.Tensor = part[tuple(slice(*span) for span in region)] if region else part[...]
        self.bytes_read += read.nbytes
        self.note(read.nbytes)
        return read

    def note(self, size: int) -> None:
        """Note that tensors of so many bytes were there at once."""
        self.most_at_once = max(self.most_at_once, size)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()


class Source(Protocol):
    """A tensor that can be read by regions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the files that it is made of."""
        ...

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy a region into ``out``, a tensor of that region's shape in whatever format and on whatever device."""


@dataclass(frozen=True)
class Leaf:
    """A tensor as a file holds it."""

    name: str
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name."""
        return (self.name,)

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy the region from the file."""
        out.copy_(reader.read(self.name, region))


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape, along a new dimension: experts that lie in the files one by one."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """``[.., parts, ..]``."""
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    @property
    def names(self) -> tuple[str, ...]:
        """Those of all parts."""
        return _names(self.parts)

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy from the parts that the region touches."""
        start, stop = region[self.dim]
        inner = (*region[: self.dim], *region[self.dim + 1 :])
        for at in range(start, stop):
            self.parts[at].fill(out.select(self.dim, at - start), inner, reader)


@dataclass(frozen=True)
class Joined:
    """Tensors end to end along a dimension: the gate's and the up projection's rows."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The parts' lengths along the dimension add up."""
        inner = self.parts[0].shape
        length = sum(part.shape[self.dim] for part in self.parts)
        return (*inner[: self.dim], length, *inner[self.dim + 1 :])

    @property
    def names(self) -> tuple[str, ...]:
        """Those of all parts."""
        return _names(self.parts)

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy from the parts that the region touches."""
        start, stop = region[self.dim]
        begin = 0
        for part in self.parts:
            end = begin + part.shape[self.dim]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                inner = _along(region, self.dim, (low - begin, high - begin))
                part.fill(out.narrow(self.dim, low - start, high - low), inner, reader)
            begin = end


@dataclass(frozen=True)
class Piece:
    """A stretch of a tensor along a dimension: the queries of a fused projection."""

    whole: Source
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole's, but for the dimension that is cut."""
        return (*self.whole.shape[: self.dim], self.length, *self.whole.shape[self.dim + 1 :])

    @property
    def names(self) -> tuple[str, ...]:
        """The whole's."""
        return self.whole.names

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy the region, moved by where this piece begins."""
        start, stop = region[self.dim]
        self.whole.fill(out, _along(region, self.dim, (start + self.start, stop + self.start)), reader)


@dataclass(frozen=True)
class Transposed:
    """A tensor with two dimensions exchanged."""

    inner: Source
    first: int
    second: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The inner one's with the two exchanged."""
        return self._exchanged(self.inner.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The inner one's."""
        return self.inner.names

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Copy the region of the inner tensor into the transposed view."""
        self.inner.fill(out.transpose(self.first, self.second), self._exchanged(region), reader)

    def _exchanged(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        listed = list(values)
        listed[self.first], listed[self.second] = listed[self.second], listed[self.first]
        return tuple(listed)


@dataclass(frozen=True)
class Converted:
    """A tensor that only the whole of others gives: they are read, computed with, and the region is cut out."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    compute: Callable[[Reader], torch.Tensor] = field(repr=False)

    def fill(self, out: torch.Tensor, region: Region, reader: Reader) -> None:
        """Compute all of it and copy the region."""
        whole = self.compute(reader)
        reader.note(whole.nbytes)
        out.copy_(whole[tuple(slice(*span) for span in region)])


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that is all of a tensor."""
    return tuple((0, length) for length in shape)


def share(parameter: torch.Tensor) -> Region | None:
    """Return the region of a tensor that this rank holds; None where it is not one stretch of each dimension.

    Plain tensors are held whole. FSDP2 after expert parallelism over the same dimension (a strided shard) gives a rank
    no single region.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Replicate, Shard

    if not isinstance(parameter, DTensor):
        return whole(tuple(parameter.shape))
    if any(type(placement) not in (Shard, Replicate) for placement in parameter.placements):
        return None
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))


def fill(parameter: torch.Tensor, source: Source, reader: Reader) -> None:
    """Copy what this rank holds of a tensor from the files into it; no collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    out = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    region = share(parameter)
    with torch.no_grad():
        if region is not None:
            source.fill(out, region, reader)
            return
        assert isinstance(parameter, DTensor)
        everything = torch.empty(source.shape, dtype=out.dtype)
        source.fill(everything, whole(source.shape), reader)
        reader.note(everything.nbytes)
        everything = everything.to(out.device)
        mine = distribute_tensor(everything, parameter.device_mesh, parameter.placements, src_data_rank=None)
        out.copy_(mine.to_local())


def _along(region: Region, dim: int, span: tuple[int, int]) -> Region:
    return (*region[:dim], span, *region[dim + 1 :])


def _names(parts: tuple[Source, ...]) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part.names)
