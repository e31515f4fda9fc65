"""A checkpoint's weights, loaded into a model that is sharded already: each rank reads its own slices of the files.

A model starts on the meta device, where parameters have shapes and no memory, is sharded there, and only then gets
memory for each rank's share and its values from the safetensors files. So no rank ever holds the whole model, on its
device or in host memory. The values are those of ``from_pretrained`` in the model's own number format, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from torchturbo.checkpoint.heads import initialise, names_in_checkpoint, packed_beside, packed_in_files, unread_in_files
from torchturbo.checkpoint.recipes import Recipes, find_recipes, state
from torchturbo.checkpoint.slices import Reader, Source, Stored, fill, headers
from torchturbo.engine.model import base_model
from torchturbo.errors import ConfigError, Problem, some
from torchturbo.logging import get_logger
from torchturbo.objectives.heads import extra_heads, is_of_heads
from torchturbo.observe.size import size
from torchturbo.parallel.agree import together

SHOWN = 3
"""Names that an error lists before it counts."""
COMPARED_ROWS = 4096
"""Rows of two tied matrices that are compared at once."""
HEADS = "mtp.enabled"
REMEDY = "use the whole model, as save_pretrained writes it"
log = get_logger(__name__)


@dataclass
class WeightSource:
    """The weights of a checkpoint, on disk.

    Made by :meth:`find`. Reading a model's sharded weights is a collective (:meth:`load`); everything else is each
    rank's own and reads headers only.
    """

    name: str
    """The folder or the name on the Hub, as the user wrote it."""
    files: tuple[Path, ...]
    """The safetensors files; empty where the checkpoint has none (older ones are pickles)."""
    dtype: torch.dtype | None = None
    """The number format that the checkpoint's configuration names; counts where there are no headers to ask."""
    _recipes: tuple[frozenset[tuple[str, torch.Size]], Recipes] | None = field(default=None, repr=False)

    @classmethod
    def find(cls, name: str, *, revision: str | None = None, dtype: torch.dtype | None = None) -> WeightSource:
        """Return the weights of a local folder or of a model on the Hub, whose files are then downloaded.

        Raises
        ------
        OSError
            As Transformers does, where the Hub can't be reached or has no such model.

        """
        ask: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        files: list[str] = []
        if single := cached_file(name, SAFE_WEIGHTS_NAME, **ask):
            files = [single]
        elif index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **ask):
            shards: Any = get_checkpoint_shard_files(name, index, revision=revision)[0]
            files = list(shards)
        return cls(name, tuple(map(Path, files)), dtype)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """What the headers say, by the tensors' names in the files."""
        return headers(self.files)

    def dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return the number format of each of a model's parameters and persistent buffers in the checkpoint, by name.

        Names are those of ``model.named_parameters()``; tied parameters stand under each of their names. What an export
        should be cast to: see :func:`torchturbo.checkpoint.hf_export.export`.
        """
        base = base_model(model)
        found = {name: self._format(source) for name, source in self.recipes(base).sources.items()}
        by_tensor = {id(tensor): found[name] for name, tensor in state(base).items() if name in found}
        known = {
            name: by_tensor.get(id(tensor), self.dtype)
            for name, tensor in state(base).items()
            if tensor.is_floating_point()
        }
        return {name: dtype for name, dtype in known.items() if dtype is not None}

    def recipes(self, model: nn.Module) -> Recipes:
        """Return how a Transformers model's tensors are made from the files'; ties that the model has are in it."""
        expected = state(model)
        signature = frozenset((name, tensor.shape) for name, tensor in expected.items())
        if self._recipes is None or self._recipes[0] != signature:
            self._recipes = (signature, find_recipes(model, self.stored))
        return self._recipes[1]

    def problems(self, model: nn.Module) -> list[Problem]:
        """Return what keeps these weights from being the model's, all at once; reads no tensor."""
        base = base_model(model)
        if base is not model and next(base.parameters()).is_meta:
            message = "can't be read into a model that got adapters while it had no weights"
            return [Problem(self.name, "", message, "read the weights with from_pretrained before it gets them")]
        heads = extra_heads(base)
        problems = [] if heads is None else self.heads_problems(base)
        recipes = self.recipes(base)
        missing = [name for name in _missing(base, recipes) if heads is None or not is_of_heads(name)]
        if missing:
            message = f"lacks {len(missing)} of the model's weights: {some(missing)}"
            problems.append(Problem(self.name, "", message, REMEDY))
        problems += self._unfit(base, lambda name: heads is None or not is_of_heads(name))
        for name in sorted(name for name, stored in self.stored.items() if stored.dtype is None)[:SHOWN]:
            problems.append(Problem(str(self.stored[name].file), "", f"holds {name} in a format that torch has not"))
        return problems

    def heads_problems(self, model: nn.Module) -> list[Problem]:
        """Return what keeps these weights from being those of a model's extra heads; reads no tensor.

        The heads are attached to the model, on any device. Those that may begin anew need not be in the files.
        """
        base: Any = base_model(model)
        heads = extra_heads(base)
        if heads is None:
            return []
        if packed := packed_beside(heads):
            return [Problem(self.name, HEADS, packed, f"use bf16 weights, or leave {HEADS} off")]
        if heads.pattern is None:
            return []
        names = names_in_checkpoint(base, heads)
        missing = [name for name in names if name not in self.stored]
        if len(missing) == len(names):
            if heads.made_new:
                return []
            message = f"holds no weights of the heads that its configuration speaks of, such as {_telling(names)}"
            return [Problem(self.name, HEADS, message, f"use a checkpoint with them, or leave {HEADS} off")]
        recipes = self.recipes(base)
        if packed := packed_in_files(base, recipes, self.stored):
            return [Problem(self.name, HEADS, packed, f"use a bf16 checkpoint, or leave {HEADS} off")]
        unmade = [name for name in _missing(base, recipes) if is_of_heads(name)]
        if missing and (unmade or any(map(is_of_heads, recipes.failures))):
            message = f"lacks {len(missing)} of the {len(names)} weights of the extra heads: {some(missing)}"
            return [Problem(self.name, HEADS, message, f"use the whole checkpoint, or leave {HEADS} off")]
        if unmade:  # what is there is of another layout, and would leave them with random values
            message = f"holds nothing that makes {len(unmade)} weights of the extra heads: {some(unmade)}"
            return [Problem(self.name, HEADS, message, f"leave {HEADS} off")]
        if unread := unread_in_files(heads, recipes):
            message = f"holds {len(unread)} tensors of the extra heads that nothing reads: {some(unread)}"
            remedy = f"use the config.json that belongs to these weights, take them out, or leave {HEADS} off"
            return [*self._unfit(base, is_of_heads), Problem(self.name, HEADS, message, remedy)]
        return self._unfit(base, is_of_heads)

    def _unfit(self, base: Any, which: Callable[[str], bool]) -> list[Problem]:
        """Return which of some of a model's tensors the files hold in another shape, or in parts that do not fit."""
        recipes, expected, problems = self.recipes(base), state(base), []
        failures = sorted((name, reason) for name, reason in recipes.failures.items() if which(name))
        for name, reason in failures[:SHOWN]:
            problems.append(Problem(self.name, "", f"can't be converted to the model's {name}: {reason}", REMEDY))
        wrong = {
            name: source.shape
            for name, source in recipes.sources.items()
            if name in expected and which(name) and source.shape != tuple(expected[name].shape)
        }
        for name in sorted(wrong)[:SHOWN]:
            file = self.stored[recipes.sources[name].names[0]].file
            message = f"holds {name} as {list(wrong[name])}, the model expects {list(expected[name].shape)}"
            more = (
                f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN and name == sorted(wrong)[SHOWN - 1] else ""
            )
            problems.append(Problem(str(file), "", message + more, "use the config.json that belongs to these weights"))
        return problems

    def load(self, model: nn.Module, device: torch.device | None = None, *, offloaded: bool = False) -> Reader:
        """Fill a model with its weights, each rank with what it holds of them.

        A collective: all ranks raise what one of them finds wrong, before a tensor is read.

        Parameters
        ----------
        model
            A Transformers model. Its parameters are plain tensors or DTensors over any mesh, and lie on a device or,
            without memory, on the meta device.
        device
            Where parameters on the meta device get their memory; None for the device of the model's mesh.
        offloaded
            Whether FSDP2 keeps parameters in host memory; buffers go to the device then too.

        Returns
        -------
        What was read: its counts of bytes are this rank's.

        Raises
        ------
        ConfigError
            With everything that is wrong with the files.

        """
        base = base_model(model)
        with together("reading the weights"):
            if problems := self.problems(model):
                raise ConfigError(problems)
            device = device or _device(base)
            reader = self._read(base, base, torch.device("cpu") if offloaded else device, device)
        log.debug("%s: this rank read %s", self.name, size(reader.bytes_read))
        return reader

    def load_heads(self, model: nn.Module, device: torch.device | None = None) -> Reader:
        """Fill the extra heads of a model that has its other weights; they may be on the meta device, or have memory.

        In one process, or on each rank before the model is sharded: every rank reads all of them.

        Parameters
        ----------
        model
            A Transformers model with heads attached.
        device
            Where tensors on the meta device get their memory; None for where the model's own weights are.

        Raises
        ------
        ConfigError
            With everything that is wrong with the files.

        """
        base = base_model(model)
        heads = extra_heads(base)
        if problems := self.heads_problems(base):
            raise ConfigError(problems)
        assert heads is not None
        device = device or next((one.device for one in base.parameters() if not one.is_meta), torch.device("cpu"))
        return self._read(base, heads, device, device)

    def _read(self, base: nn.Module, part: nn.Module, parameters: torch.device, buffers: torch.device) -> Reader:
        """Give a model, or the extra heads in it, memory on the devices of parameters and buffers, and their values."""
        heads, empty = extra_heads(base), {id(one) for one in part.parameters() if one.is_meta}
        inside = [name for name, one in state(base).items() if id(one) in empty]
        _materialise(part, parameters, buffers)
        reader = Reader(self.stored)
        try:
            self._fill(base, reader, is_of_heads if part is heads else None)
        except (OSError, SafetensorError) as error:
            raise ConfigError([Problem(self.name, "", f"can't be read: {error}")]) from error
        finally:
            reader.close()
        if heads is not None:
            heads.copies = {other: name for other, name in heads.copies.items() if other in self.stored}
            unread = [name for name in inside if is_of_heads(name) and name not in self.recipes(base).sources]
            initialise(base, heads, {id(base.get_parameter(name)) for name in unread})
        _compute_buffers(base, self.recipes(base), part)
        return reader

    def tie(self, model: nn.Module) -> None:
        """Tie a model's parameters on the meta device as ``from_pretrained`` ties real ones.

        Where the files hold both of two parameters that the configuration ties, Transformers compares them, and ties
        them only if they are equal. On the meta device it can't, and leaves them apart.
        """
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        sources = self.recipes(model).sources
        apart = {
            target: origin
            for target, origin in tied.items()
            if model.get_parameter(target) is not model.get_parameter(origin)
            and target in sources
            and origin in sources
        }
        reader = Reader(self.stored)
        for target, origin in apart.items():
            if _equal(sources[target], sources[origin], model.get_parameter(target).dtype, reader):
                _set(model, target, model.get_parameter(origin))
            else:
                tied.pop(target)
        reader.close()

    def _fill(self, model: nn.Module, reader: Reader, which: Callable[[str], bool] | None = None) -> None:
        sources, done = self.recipes(model).sources, set()
        for name, tensor in state(model).items():
            if name in sources and id(tensor) not in done and (which is None or which(name)):
                fill(tensor, sources[name], reader)
                done.add(id(tensor))

    def _format(self, source: Source) -> torch.dtype | None:
        """Return the number format of what a tensor is made of; the first, where they are several."""
        formats = (self.stored[name].dtype for name in source.names)
        return next((dtype for dtype in formats if dtype is not None and dtype.is_floating_point), None)


def _missing(model: nn.Module, recipes: Recipes) -> list[str]:
    """Return the tensors that nothing in the files makes, and that are not tied to one that is made."""
    expected = state(model)
    made = {id(tensor) for name, tensor in expected.items() if name in recipes.sources}
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return sorted(
        name
        for name, tensor in expected.items()
        if id(tensor) not in made
        and name not in recipes.failures
        and not (not isinstance(tensor, nn.Parameter) and any(re.search(pattern, name) for pattern in ignored))
    )


def _device(model: nn.Module) -> torch.device:
    """Return the device of a model's mesh; that of its parameters where it is not sharded."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    first = next(model.parameters())
    return torch.device("cpu") if first.is_meta else first.device


def _materialise(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Give tensors on the meta device their memory, and keep parameters tied that are."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=parameters) if tensor.is_meta else tensor

    model._apply(grow)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(buffers)
    for first, *others in names.values():  # each of them got memory of its own
        for other in others:
            _set(model, other, model.get_parameter(first))
            assert model.get_parameter(other) is model.get_parameter(first)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)


def _compute_buffers(model: Any, recipes: Recipes, part: nn.Module) -> None:
    """Compute the buffers that no checkpoint holds, rotary frequencies above all, as ``from_pretrained`` does.

    Transformers' initialisation skips what is marked as initialised, tensors and modules: all but these buffers is,
    and all that is outside of a part of the model.
    """
    kept, wanted = state(model), {id(module) for module in part.modules()}
    for tensor in kept.values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for path, module in model.named_modules():
        computed = False
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{path}.{name}" if path else name
            buffer._is_hf_initialized = full in recipes.sources or id(module) not in wanted
            computed |= not buffer._is_hf_initialized
        module._is_hf_initialized = not computed
    model.initialize_weights()


def _equal(first: Source, second: Source, dtype: torch.dtype, reader: Reader) -> bool:
    """Return whether two tensors on disk hold the same numbers; a stretch of rows at a time."""
    if first.shape != second.shape:
        return False
    return all(torch.equal(*pair) for pair in _stretches(first, second, dtype, reader))


def _stretches(
    first: Source, second: Source, dtype: torch.dtype, reader: Reader
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows, *rest = first.shape
    for start in range(0, rows, COMPARED_ROWS):
        stop = min(rows, start + COMPARED_ROWS)
        region = ((start, stop), *((0, length) for length in rest))
        left, right = torch.empty(2, stop - start, *rest, dtype=dtype)
        first.fill(left, region, reader)
        second.fill(right, region, reader)
        yield left, right


def _telling(names: list[str]) -> str:
    """Return a name that only a head's tensor has: the shortest is that of its own projection or norm, as a rule."""
    return min(names, key=lambda name: (name.count("."), len(name), name))
