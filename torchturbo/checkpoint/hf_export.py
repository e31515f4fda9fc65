"""Exports for others: a folder as ``save_pretrained`` writes it, from a model of which no rank holds all.

Each tensor is cast to the number format of the checkpoint that it came from, gathered, and turned back into what the
family's checkpoints hold (fused experts one by one again), by Transformers' own tables. One group of tensors is whole
at a time, and the first rank keeps no more than one file of them.

The other way would be ``torch.distributed.checkpoint``'s ``HuggingFaceStorageWriter``: every rank writes its shards and
one joins them into files. It writes everything twice, keeps fused experts fused, and needs the casts as a copy of the
whole shard; ``benchmarks/engine_export.py`` holds both beside each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    dot_natural_key,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from torchturbo.checkpoint.files import remove
from torchturbo.checkpoint.heads import copies, in_checkpoint, save_beside
from torchturbo.checkpoint.recipes import conversions, plain_class, state
from torchturbo.engine.model import base_model
from torchturbo.logging import get_logger
from torchturbo.objectives.heads import BESIDE, extra_heads, is_of_heads
from torchturbo.parallel.agree import from_first, is_first, together

MAX_SHARD_SIZE = "5GB"
"""The most bytes of one file. ``save_pretrained`` has ten times as much; the first rank holds one file in memory."""
WHAT = "exporting the model"
log = get_logger(__name__)


@dataclass
class _Plan:
    """What is written, known from shapes alone and the same on every rank."""

    groups: list[list[str]]
    """The model's tensors, those together that are converted together, in the order in which files hold them."""
    formats: dict[str, torch.dtype]
    """The format each of the model's tensors is written in."""
    files: dict[str, list[str]]
    """The tensors in each file, in the checkpoint's names."""
    finished: dict[int, list[str]]
    """The files that are complete after a group, by the group's number."""
    index: dict[str, Any] | None
    """What the index holds; None for a model in one file."""
    copies: dict[str, list[str]]
    """What is written a second time for extra heads: names in the checkpoint, by the model's."""
    beside: list[str]
    """The model's tensors that extra heads write into files of their own."""


def export(
    model: nn.Module,
    folder: Path,
    *,
    saved_dtypes: Mapping[str, torch.dtype],
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a model, or a PEFT model's adapters, as ``save_pretrained`` does; it loads with plain ``from_pretrained``.

    A collective: all ranks of the default process group call it, and all raise what one of them can't do. Without a
    process group it writes a model that one process holds.

    Parameters
    ----------
    model
        A Transformers or PEFT model; its parameters are plain tensors or DTensors. Its configuration is written as it
        is, so that a key-value cache that training goes without is turned on by the caller.
    folder
        Where to write; made on the first rank. Weight files of an earlier model in it are removed.
    saved_dtypes
        Number format of each parameter and persistent buffer by name, see
        :attr:`torchturbo.engine.context.Context.saved_dtypes`; what is not in it keeps its own.
    max_shard_size
        The most bytes of one file, or as ``"5GB"``.

    Raises
    ------
    ConfigError
        If a rank can't write its part: what kept it from it. On that rank itself the error that was met.

    """
    if _has_adapters(model):
        _export_adapters(model, folder, saved_dtypes)
        return
    base: Any = base_model(model)
    with _conversions_kept(base):
        _export(base, folder, saved_dtypes, max_shard_size)


def _export(model: Any, folder: Path, saved_dtypes: Mapping[str, torch.dtype], max_shard_size: int | str) -> None:
    with together(WHAT):
        plan = _plan(model, saved_dtypes, max_shard_size)
    writer = _Writer(folder, model, plan)
    tensors = state(model)
    for number, group in enumerate(plan.groups):
        gathered = {name: _gathered(tensors[name], plan.formats[name]) for name in group}
        writer.take(gathered)
        del gathered
        for file in plan.finished.get(number, ()):
            with together(WHAT):
                writer.write(file)
    with together(WHAT):
        writer.finish()
    _export_beside(model, folder, plan, tensors)


def _export_beside(model: Any, folder: Path, plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gather what extra heads keep beside the model, all of it on the first rank, and let them write it."""
    if not plan.beside:
        return
    held: dict[str, torch.Tensor] = {}
    for name in plan.beside:
        gathered = _gathered(tensors[name], plan.formats[name])
        held |= {name: gathered.cpu()} if is_first() else {}
    with together(WHAT):
        if is_first() and (heads := extra_heads(model)) is not None:
            save_beside(heads, folder, held)


def _plan(model: Any, saved_dtypes: Mapping[str, torch.dtype], max_shard_size: int | str) -> _Plan:
    """Return what a model is written as, by running the conversion on tensors without memory."""
    tensors = state(model)
    formats = {
        name: saved_dtypes.get(name, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in tensors.items()
    }
    ignored = set(model._keys_to_ignore_on_save or ())
    heads = extra_heads(model)
    beside = [name for name in tensors if is_of_heads(name)] if heads is not None and heads.beside else []
    ignored |= set(beside)
    outline = {
        name: torch.empty(tensor.shape, dtype=formats[name], device="meta")
        for name, tensor in tensors.items()
        if name not in ignored
    }
    parameters = {name: one for name, one in outline.items() if isinstance(tensors[name], nn.Parameter)}
    doubled = parameters.keys() - remove_tied_weights_from_state_dict(dict(parameters), model).keys()
    outline = {name: one for name, one in outline.items() if name not in doubled}
    groups, doubles = _groups(model, outline), copies(model, outline)
    written: dict[str, torch.Tensor] = {}
    last: dict[str, int] = {}
    for number, group in enumerate(groups):
        made = in_checkpoint(model, {one: outline[one] for one in group})
        for name, tensor in (made | _doubled(outline, group, doubles)).items():
            written[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            last[name] = number
    split = split_torch_state_dict_into_shards(
        written,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    finished: dict[int, list[str]] = {}
    for file, names in split.filename_to_tensors.items():
        finished.setdefault(max(last[name] for name in names), []).append(file)
    metadata = {"total_parameters": model.num_parameters(), **split.metadata}
    index = {"metadata": metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return _Plan(groups, formats, split.filename_to_tensors, finished, index, doubles, beside)


def _doubled(
    tensors: Mapping[str, torch.Tensor], group: Iterable[str], doubles: Mapping[str, list[str]]
) -> dict[str, torch.Tensor]:
    """Return what of a group is written a second time, by its names in the checkpoint; no file holds a tensor twice."""
    return {other: tensors[name].clone() for name in group for other in doubles.get(name, ())}


def _groups(model: Any, names: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the model's tensors, those together that one conversion takes together on the way back."""
    heads = extra_heads(model)
    tables = {False: _reversed(model._weight_conversions), True: _reversed(heads.transforms if heads else ())}
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        key = name
        for converter in tables[heads is not None and is_of_heads(name)]:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                key = renamed
                break
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _reversed(transforms: Sequence[Any]) -> list[Any]:
    return [entry.reverse_transform() for entry in transforms[::-1] if isinstance(entry, WeightConverter)]


@contextmanager
def _conversions_kept(model: Any) -> Iterator[None]:
    """Let a model know the conversions of its checkpoint for this block, as ``revert_weight_conversion`` finds them.

    ``from_pretrained`` leaves them on the model. Without them Transformers would look for them for every tensor again.
    """
    if getattr(model, "_weight_conversions", None) is not None:
        yield
        return
    known = conversions(model, add_legacy=False)
    model._weight_conversions = [entry for entry in known if type(entry) is not PrefixChange]
    try:
        yield
    finally:
        del model._weight_conversions


def _gathered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole of a tensor in a number format, on its device. A collective for a sharded one."""
    value: Any = tensor.detach().to(dtype)
    if not isinstance(value, DTensor):
        plain: torch.Tensor = value
        return plain
    kind = value.device_mesh.device_type
    if value.device.type != kind:  # offloaded: the mesh's process group does not see host memory
        value = value.to(kind)
    whole: torch.Tensor = value.full_tensor()
    return whole


@dataclass
class _Writer:
    """Writes the files on the first rank, and holds what is not written yet there; elsewhere it does nothing.

    An error waits for the next :meth:`write`, for in between the ranks gather together.
    """

    folder: Path
    model: Any
    plan: _Plan
    waiting: dict[str, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None

    def take(self, gathered: Mapping[str, torch.Tensor]) -> None:
        """Keep a group of the model's tensors, converted to what the checkpoint holds."""
        if not is_first() or self.error is not None:
            return
        try:
            held = {name: tensor.cpu() for name, tensor in gathered.items()}
            self.waiting |= in_checkpoint(self.model, held) | _doubled(held, held, self.plan.copies)
        except Exception as error:
            self.error = error

    def write(self, file: str) -> None:
        """Write a file whose tensors are all there."""
        if not is_first():
            return
        if self.error is not None:
            raise self.error
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {name: self.waiting.pop(name).contiguous() for name in self.plan.files[file]}
        save_file(content, self.folder / file, metadata={"format": "pt"})

    def finish(self) -> None:
        """Write the index and the configuration, which makes the folder a model, and remove another model's files."""
        if not is_first():
            return
        for old in (*self.folder.glob("model-*-of-*.safetensors"), self.folder / SAFE_WEIGHTS_NAME):
            if old.name not in self.plan.files:
                old.unlink(missing_ok=True)
        if not self.plan.beside and (self.folder / BESIDE / "config.json").is_file():  # another target's draft
            log.warning_rank0("%s is removed: it is the draft of an earlier model", self.folder / BESIDE)
            remove(self.folder / BESIDE)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        if self.plan.index is None:
            index.unlink(missing_ok=True)
        else:
            index.write_text(json.dumps(self.plan.index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _write_config(self.model, self.folder, self.plan)


def _write_config(model: Any, folder: Path, plan: _Plan) -> None:
    """Write the configuration with the format most weights are written in, and the class as its author named it."""
    config, kind = model.config, plain_class(type(model))
    tensors, sizes = state(model), Counter[torch.dtype]()
    for name, dtype in plan.formats.items():
        sizes[dtype] += tensors[name].numel() if dtype.is_floating_point else 0
    (most, _), *_ = sizes.most_common(1)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    with ExitStack() as stack:
        for part in (config, *(part for part in parts if part is not None)):
            stack.enter_context(_restored(part, "dtype"))
            part.dtype = str(most).removeprefix("torch.")
        for name in ("architectures", "auto_map"):
            stack.enter_context(_restored(config, name))
        config.architectures = [kind.__name__]
        if model.is_remote_code():
            custom_object_save(object.__new__(kind), str(folder), config=config)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        config.save_pretrained(folder)


@contextmanager
def _restored(config: Any, name: str) -> Iterator[None]:
    """Leave an attribute as it was found."""
    there, before = hasattr(config, name), getattr(config, name, None)
    try:
        yield
    finally:
        if there:
            setattr(config, name, before)
        elif hasattr(config, name):
            delattr(config, name)


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)


def _export_adapters(model: Any, folder: Path, saved_dtypes: Mapping[str, torch.dtype]) -> None:
    """Gather the adapters' tensors, which are small, and let PEFT write them."""
    tensors = state(model)
    names = from_first(WHAT, lambda: _adapter_names(model, tensors))
    gathered = {name: _gathered(tensors[name], saved_dtypes.get(name, tensors[name].dtype)).cpu() for name in names}
    with together(WHAT):
        if is_first():
            model.save_pretrained(str(folder), state_dict=gathered)


def _adapter_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors that PEFT saves of a model, layers that are trained whole and grown embeddings included."""
    from peft import get_peft_model_state_dict

    outline = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    wanted = {
        id(tensor)
        for adapter in model.peft_config
        for tensor in get_peft_model_state_dict(model, state_dict=dict(outline), adapter_name=adapter).values()
    }
    return [name for name, tensor in outline.items() if id(tensor) in wanted]
