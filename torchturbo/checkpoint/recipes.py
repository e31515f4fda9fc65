"""Which tensors of a checkpoint make which of a model, by Transformers' own conversion tables.

Transformers keeps the experts of a layer fused in one tensor and most checkpoints keep them one by one; it renames,
adds or drops a base model's prefix, and splits or joins projections. Its tables (``transformers.conversion_mapping``)
say how, and ``transformers.core_model_loading.convert_and_load_state_dict_in_model`` is how ``from_pretrained`` applies
them: the loop of :func:`find_recipes` is that one, on headers instead of tensors. Tensors that belong to a model's extra
heads are converted by the heads' own table, as if the family had no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from torchturbo.checkpoint.slices import (
    Converted,
    Joined,
    Leaf,
    Piece,
    Reader,
    Source,
    Stacked,
    Stored,
    Transposed,
    whole,
)
from torchturbo.objectives.heads import extra_heads, is_of_heads


@dataclass
class Recipes:
    """How a model's tensors are made from a checkpoint's."""

    sources: dict[str, Source] = field(default_factory=dict)
    """By the model's names."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the checkpoint that nothing of the model is made of."""
    failures: dict[str, str] = field(default_factory=dict)
    """Model tensors whose conversion does not work on what the checkpoint holds, and why."""


@dataclass
class _Group:
    """File tensors that are converted together."""

    converter: WeightConverter | None
    """Transformers' own, without tensors; None for one tensor that is only renamed."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """The file tensors by the pattern that they matched, in the order in which they are merged."""


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and persistent buffers by name, tied ones under each of their names.

    Parameters that FSDP2 left whole after a forward pass are shards again: its hooks on ``state_dict`` see to that.
    """
    kept = model.state_dict(keep_vars=True)
    return {name: value for name, value in kept.items() if isinstance(value, torch.Tensor)}


def plain_class(kind: type) -> type:
    """Return a model's class without what ``fully_shard`` put before it."""
    return next(one for one in kind.__mro__ if not issubclass(one, FSDPModule))


def conversions(model: nn.Module, **asked: Any) -> list[Any]:
    """Return Transformers' conversions of a model's checkpoint, sharded or not: those of its plain class.

    For the one that ``fully_shard`` makes, Transformers has none: it looks like the user's own code.
    """
    kind = type(model)
    model.__class__ = plain_class(kind)
    try:
        owner: Any = model
        found: list[Any] = get_model_conversion_mapping(owner, **asked)
    finally:
        model.__class__ = kind
    return found


class _Table(NamedTuple):
    """How some of a checkpoint's tensors become some of a model's."""

    expected: Mapping[str, torch.Tensor]
    """The tensors of the model that are made, by name."""
    stored: Sequence[str]
    """The tensors in the files that they are made of, by name."""
    transforms: Sequence[Any]
    prefix: str | None
    """The base model's name inside the model, which a file's names may lack or have too much."""


def find_recipes(model: nn.Module, stored: Mapping[str, Stored]) -> Recipes:
    """Return how a model's tensors are made from what some files hold; no tensor is read.

    ``model`` is a Transformers model on any device, sharded or not.
    """
    found = Recipes()
    for table in _tables(model, stored):
        for first, group in _grouped(table, found.unexpected).items():
            try:
                found.sources.update(_sources(model, first, group, stored, table.expected[first].dtype))
            except Exception as error:  # an operation's own errors are of any kind
                found.failures[first] = f"{type(error).__name__}: {error}"
    return found


def _tables(model: nn.Module, stored: Mapping[str, Stored]) -> Iterator[_Table]:
    """Yield the family's table, for all but what extra heads own, and the heads' own."""
    names = sorted(stored, key=dot_natural_key)
    expected, heads = state(model), extra_heads(model)
    prefix: str = getattr(model, "base_model_prefix", "")
    transforms = conversions(model)
    if heads is None:
        yield _Table(expected, names, transforms, prefix)
        return
    inside = {name: tensor for name, tensor in expected.items() if is_of_heads(name)}
    outside = {name: tensor for name, tensor in expected.items() if name not in inside}
    yield _Table(outside, [name for name in names if not heads.owns(name)], transforms, prefix)
    yield _Table(inside, [name for name in names if heads.owns(name)], heads.transforms, None)


def _grouped(table: _Table, unexpected: list[str]) -> dict[str, _Group]:
    """Sort the file's tensors by the model's tensor that they go into, the first of several."""
    renamings = [entry for entry in table.transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table.transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected: Any = table.expected
    groups: dict[str, _Group] = {}
    for name in table.stored:
        target, pattern = rename_source_key(name, renamings, converters, table.prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], table.prefix, expected)
        if target not in expected:
            unexpected.append(name)
            continue
        if target not in groups:
            groups[target] = _Group(None if pattern is None else by_pattern[pattern])
        groups[target].names.setdefault(pattern or name, []).append(name)
    return groups


def _convert(model: Any, first: str, group: _Group, tensor: Callable[[str], Any]) -> dict[str, torch.Tensor]:
    if group.converter is None:
        return {first: tensor(_only(group))}
    converter = deepcopy(group.converter)
    for pattern, names in group.names.items():
        for name in names:
            converter.add_tensor(first, name, pattern, tensor(name))
    made = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _sources(
    model: nn.Module, first: str, group: _Group, stored: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, Source]:
    made = _by_parts(group, stored)
    if made is not None and len(made) == 1:
        return {first: made[0]}
    # Names and shapes are what Transformers' conversion makes of tensors without memory.
    outline = _convert(model, first, group, lambda name: torch.empty(stored[name].shape, dtype=dtype, device="meta"))
    shapes = {name: tuple(value.shape) for name, value in outline.items()}
    if made is not None and [part.shape for part in made] == list(shapes.values()):
        return dict(zip(shapes, made, strict=True))
    names = tuple(name for several in group.names.values() for name in several)

    def compute(target: str) -> Callable[[Reader], torch.Tensor]:
        def run(reader: Reader) -> torch.Tensor:
            def read(name: str) -> torch.Tensor:
                return reader.read(name, whole(stored[name].shape)).to(dtype)

            return _convert(model, first, group, read)[target]

        return run

    return {target: Converted(shape, names, compute(target)) for target, shape in shapes.items()}


def _by_parts(group: _Group, stored: Mapping[str, Stored]) -> tuple[Source, ...] | None:
    """Return what a group makes where all its operations only move numbers; None where one of them computes."""
    if group.converter is None:
        name = _only(group)
        return (Leaf(name, stored[name].shape),)
    lists: dict[str, list[Source]] = {
        pattern: [Leaf(name, stored[name].shape) for name in group.names[pattern]]
        for pattern in group.converter.source_patterns
        if pattern in group.names
    }
    parts: list[Sequence[Source]] = list(lists.values())
    for operation in group.converter.operations:
        moved = _moved(operation, parts, len(group.converter.target_patterns))
        if moved is None:
            return None
        parts = moved
    return tuple(several[0] for several in parts) if all(len(several) == 1 for several in parts) else None


def _moved(operation: Any, parts: list[Sequence[Source]], targets: int) -> list[Sequence[Source]] | None:
    """Return the lists of tensors after one operation that moves numbers; None for any other.

    Subclasses may do more than what they come from, so that types are compared, not asked for their kind.
    """
    kind, single = type(operation), len(parts) == 1 and len(parts[0]) == 1
    axes = len(parts[0][0].shape)
    if kind is MergeModulelist:
        alike = all(part.shape == several[0].shape for several in parts for part in several)
        return [(Stacked(tuple(several), operation.dim % (axes + 1)),) for several in parts] if alike else None
    if kind is Concatenate:
        every, dim = tuple(part for several in parts for part in several), operation.dim % axes
        return [(Joined(every, dim),)] if len({_without(part.shape, dim) for part in every}) == 1 else None
    if kind is Transpose and single and not operation.check_dims:
        return [(Transposed(parts[0][0], operation.dim0 % axes, operation.dim1 % axes),)]
    if kind is Chunk and single and getattr(operation, "num_shards_attribute", None) is None:
        return [(piece,) for piece in _chunks(parts[0][0], operation.dim % axes, targets)]
    return None


def _chunks(source: Source, dim: int, count: int) -> list[Source]:
    """Return the pieces that ``torch.chunk`` cuts: equal ones, but for the last."""
    length = source.shape[dim]
    size = -(-length // count)
    return [Piece(source, dim, start, min(size, length - start)) for start in range(0, length, size)]


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _only(group: _Group) -> str:
    """Return the name of the tensor that is only renamed; of several that become one, the first, as Transformers does."""
    return next(iter(group.names.values()))[0]
