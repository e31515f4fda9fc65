"""Regions of tensors on disk against the same regions of whole tensors, and how much is read for them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchturbo.checkpoint.slices import Joined, Leaf, Piece, Reader, Source, Stacked, Transposed, fill, headers, whole


@pytest.fixture
def tensors(tmp_path: Path) -> tuple[Reader, dict[str, torch.Tensor]]:
    made = {f"t{at}": torch.randn(4, 6) for at in range(3)} | {"scalar": torch.tensor(3.0)}
    save_file(made, tmp_path / "a.safetensors")
    return Reader(headers([tmp_path / "a.safetensors"])), made


LEAVES = tuple(Leaf(f"t{at}", (4, 6)) for at in range(3))


def expected(kind: str, made: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = [made[f"t{at}"] for at in range(3)]
    return {
        "leaf": parts[0],
        "stacked": torch.stack(parts),
        "stacked inside": torch.stack(parts, dim=1),
        "joined": torch.cat(parts),
        "joined columns": torch.cat(parts, dim=1),
        "piece": parts[0][1:3],
        "transposed": parts[0].T,
        "experts": torch.cat([torch.stack(parts), torch.stack(parts)], dim=1).transpose(1, 2),
    }[kind]


SOURCES: dict[str, Source] = {
    "leaf": LEAVES[0],
    "stacked": Stacked(LEAVES, 0),
    "stacked inside": Stacked(LEAVES, 1),
    "joined": Joined(LEAVES, 0),
    "joined columns": Joined(LEAVES, 1),
    "piece": Piece(LEAVES[0], 0, 1, 2),
    "transposed": Transposed(LEAVES[0], 0, 1),
    "experts": Transposed(Joined((Stacked(LEAVES, 0), Stacked(LEAVES, 0)), 1), 1, 2),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_region_is_that_of_the_whole_tensor(kind: str, tensors: tuple[Reader, dict[str, torch.Tensor]]) -> None:
    reader, made = tensors
    source, full = SOURCES[kind], expected(kind, made)
    assert source.shape == tuple(full.shape)
    spans = [[(start, stop) for start in range(size) for stop in range(start + 1, size + 1, 2)] for size in full.shape]
    for region in itertools.product(*(several[::3] for several in spans)):
        part = full[tuple(slice(*span) for span in region)]
        out = torch.full(part.shape, torch.nan)
        before = reader.bytes_read
        source.fill(out, region, reader)
        assert torch.equal(out, part)
        assert reader.bytes_read - before == part.nbytes  # and nothing beside it
    reader.close()


def test_values_are_cast_to_the_format_of_what_they_are_read_into(
    tensors: tuple[Reader, dict[str, torch.Tensor]],
) -> None:
    reader, made = tensors
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    fill(out, LEAVES[0], reader)
    assert torch.equal(out, made["t0"].bfloat16())
    scalar = torch.empty(())
    fill(scalar, Leaf("scalar", ()), reader)
    assert float(scalar) == 3.0
    assert whole(()) == ()


def test_headers_know_every_format_that_torch_writes(tmp_path: Path) -> None:
    formats = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
    formats += [torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    formats += [torch.float8_e4m3fn, torch.float8_e5m2]
    save_file({str(dtype): torch.zeros(2, dtype=dtype) for dtype in formats}, tmp_path / "all.safetensors")
    found = headers([tmp_path / "all.safetensors"])
    assert {name: stored.dtype for name, stored in found.items()} == {str(dtype): dtype for dtype in formats}
