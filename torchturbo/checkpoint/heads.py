"""Extra heads in a checkpoint: their tensors' names there, values for those that no file holds, and saving them.

A family's own conversion table knows nothing of tensors that Transformers leaves aside, and could mistake one for
another. So what the heads own (:meth:`torchturbo.objectives.heads.ExtraHeads.owns`) is converted by the heads' table,
and everything else by the family's, as if the heads were not there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from torchturbo.checkpoint.slices import Converted, Leaf, Reader, fill, headers
from torchturbo.objectives.heads import NAME, ExtraHeads, extra_heads, is_of_heads
from torchturbo.objectives.mtp.families import COUNTS, family_of, said_by

if TYPE_CHECKING:
    from torchturbo.checkpoint.recipes import Recipes
    from torchturbo.checkpoint.slices import Stored

BELOW = f"{NAME}."
COMPUTED = "rotary_emb.inv_freq"
"""How the names end of what older checkpoints hold and models compute."""


def in_checkpoint(base: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some of a model's tensors as its family's checkpoints hold them; what is converted together comes together.

    Tensors may be on the meta device.
    """
    heads = extra_heads(base)
    if heads is None:
        return dict(revert_weight_conversion(base, dict(tensors)))
    own = {name: tensor for name, tensor in tensors.items() if is_of_heads(name)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    made: dict[str, Tensor] = dict(revert_weight_conversion(base, rest)) if rest else {}
    if own:
        table: Any = SimpleNamespace(_weight_conversions=list(heads.transforms), config=base.config)
        made |= revert_weight_conversion(table, own)
    return made


def names_in_checkpoint(base: nn.Module, heads: ExtraHeads) -> list[str]:
    """Return what a checkpoint calls the heads' tensors, all of them, in order."""
    outline = {
        f"{BELOW}{name}": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in heads.state_dict(keep_vars=True).items()
    }
    return sorted(in_checkpoint(base, outline))


def copies(base: nn.Module, written: Collection[str]) -> dict[str, list[str]]:
    """Return what an export writes a second time, for the heads: for some of the model's tensors the names of copies.

    ``written`` are the names of the model's tensors that are written; a tied one is there under one of its names.
    """
    heads = extra_heads(base)
    if heads is None or heads.beside or not heads.copies:
        return {}
    tensors = base.state_dict(keep_vars=True)
    place = {id(tensors[name]): name for name in written}
    found: dict[str, list[str]] = {}
    for other, name in sorted(heads.copies.items()):
        if (shared := place.get(id(tensors.get(name)))) is not None:
            found.setdefault(shared, []).append(other)
    return found


def packed_in_files(base: nn.Module, recipes: Recipes, stored: Mapping[str, Stored]) -> str:
    """Return which tensor of the files a head would be made of although it is not in numbers to train; empty for none.

    FP8 and integers mean something with their scales alone, which the heads' table does not read.
    """
    heads, expected = extra_heads(base), base.state_dict(keep_vars=True)
    used = {
        name
        for target, source in recipes.sources.items()
        if is_of_heads(target) and target in expected and expected[target].is_floating_point()
        for name in source.names
    }
    used |= {name for name, one in stored.items() if one.dtype is None and heads is not None and heads.owns(name)}
    return _packed({name: stored[name] for name in used})


def packed_beside(heads: ExtraHeads) -> str:
    """Return the same of heads that are read from files of their own."""
    return _packed(headers(heads.files))


def _packed(stored: Mapping[str, Stored]) -> str:
    packed = sorted(name for name, one in stored.items() if _is_packed(one.dtype))
    if not packed:
        return ""
    kind = stored[packed[0]].dtype
    what = "a format that torch has not" if kind is None else str(kind).removeprefix("torch.")
    more = f" (and {len(packed) - 1} more of its heads' tensors)" if len(packed) > 1 else ""
    return f"holds {packed[0]} as {what}{more}: heads are read without scales, from float32, bfloat16 or float16"


def _is_packed(dtype: torch.dtype | None) -> bool:
    return dtype is None or not dtype.is_floating_point or dtype.itemsize == 1


def unread_in_files(heads: ExtraHeads, recipes: Recipes) -> list[str]:
    """Return the tensors of the files that are the heads', and that nothing of them is made of; exports would lack them.

    Copies of the model's own weights, and frequencies that are computed, are no loss.
    """
    return [
        name
        for name in recipes.unexpected
        if heads.owns(name) and name not in heads.copies and not name.endswith(COMPUTED)
    ]


# ---- values for what no file holds ----


def initialise(base: Any, heads: nn.Module, only: Collection[int] | None = None) -> None:
    """Give heads the values in files of their own, or those that their classes give new ones: the same on every mesh.

    Module by module a whole one is made in host memory, and each rank copies what it holds of it.

    Parameters
    ----------
    base
        The model that the heads belong to; its ``_init_weights`` knows how its family's modules begin.
    heads
        Its heads, sharded or not, with memory.
    only
        The ids of the parameters that get values; None for all.

    Raises
    ------
    ValueError
        If a module leaves some of its weights without a value.

    """
    reader = Reader(headers(getattr(heads, "files", ())))
    around = dict(heads.named_modules())
    for path, module in around.items():
        wanted = {name: one for name, one in _own(module) if only is None or id(one) in only}
        kept = {name: f"{path}.{name}".lstrip(".") for name in wanted}
        kept = {name: other for name, other in kept.items() if other in reader.stored}
        made = (
            _made(base, module, f"{NAME}.{path}", around.get(path.rpartition(".")[0]))
            if wanted.keys() - kept.keys()
            else {}
        )
        for name, parameter in wanted.items():
            shape = tuple(parameter.shape)
            source = Leaf(kept[name], shape) if name in kept else Converted(shape, (), _giving(made[name]))
            fill(parameter, source, reader)
    reader.close()


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in module._parameters.items() if one is not None)


def _giving(tensor: Tensor) -> Callable[[Reader], Tensor]:
    return lambda reader: tensor


def _made(base: Any, module: nn.Module, path: str, parent: nn.Module | None) -> dict[str, Tensor]:
    """Return whole tensors for a module's own parameters, as its class begins with them; the module is left alone."""
    new = _shadow(module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(path.encode()))
        base._init_weights(new)
        if _lacks_values(new) and hasattr(new, "reset_parameters"):
            new.reset_parameters()
        if _lacks_values(new) and parent is not None:  # some families' routers begin with what their block gives them
            around, name = _shadow(parent), path.rpartition(".")[2]
            around._modules = {one: new if one == name else _shadow(child) for one, child in parent.named_children()}
            base._init_weights(around)
    if name := _lacks_values(new):
        raise ValueError(f"{type(module).__name__} does not say what {path}.{name} begins with")
    return dict(_own(new))


def _shadow(module: nn.Module) -> Any:
    """Return a module of the same class, with whole tensors without values in host memory."""
    new: Any = object.__new__(type(module))  # sharded classes have a __new__ of their own
    new.__dict__ = dict(vars(module))
    nothing = float("nan")
    new._parameters = {**module._parameters} | {
        name: nn.Parameter(torch.full(one.shape, nothing)) for name, one in _own(module)
    }
    new._buffers = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in module.named_buffers(recurse=False)}
    new._modules, new._is_hf_initialized = dict(module._modules), False
    return new


def _lacks_values(module: nn.Module) -> str:
    return next((name for name, one in _own(module) if one.isnan().any()), "")


# ---- Transformers' own way of saving ----


def save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    *args: Any,
    save_original_format: bool = True,
    **kwargs: Any,
) -> None:
    """Stand in for a model's own method: extra heads are written by their names in checkpoints, and without any it says so."""
    heads, own = extra_heads(self), type(self).save_pretrained
    tensors = self.state_dict() if state_dict is None else state_dict
    if heads is None or not save_original_format:
        with _says_none(self) if heads is None else nullcontext():
            own(
                self,
                save_directory,
                is_main_process,
                tensors,
                *args,
                save_original_format=save_original_format,
                **kwargs,
            )
        return
    ignored = set(self._keys_to_ignore_on_save or ())
    inside = {name: one for name, one in tensors.items() if is_of_heads(name)}
    outside = {name: one for name, one in tensors.items() if name not in inside and name not in ignored}
    outside = remove_tied_weights_from_state_dict(outside, self)
    written = in_checkpoint(self, outside if heads.beside else outside | inside)
    for name, others in copies(self, outside).items():
        written |= {other: outside[name].clone() for other in others}
    own(self, save_directory, is_main_process, written, *args, save_original_format=False, **kwargs)
    if heads.beside and is_main_process:
        save_beside(heads, Path(save_directory), inside)


Said = list[tuple[Any, str, Any]]
"""Configurations of a model, names in them, and what they say there of heads; None where they say nothing."""
STAGES = ("deepseek_v4", "dspark_")
"""A model type whose configuration speaks of a draft in its files, and how the names begin under which it does."""


def say_none(base: Any) -> Said:
    """Let a model's configurations say that it has no heads; return what they said.

    A family whose models have some for multi-token prediction without saying so gets the word, too. What describes
    DeepSeek-V4's draft goes: an engine that serves the model would look for the weights.
    """
    config = getattr(base, "config", None)
    text = getattr(config, "get_text_config", None)
    if config is None or text is None:
        return []
    parts = {id(part): part for part in (text(decoder=True), config)}.values()
    numbers: Said = [
        (part, name, number)
        for part in parts
        for name in COUNTS
        if isinstance(number := getattr(part, name, None), int) and number > 0
    ]
    family = family_of(config)
    if not numbers and family is not None and family.unsaid and said_by(config) is None:
        numbers = [(text(decoder=True), COUNTS[0], None)]
    kind, prefix = STAGES
    stages: Said = [
        (part, name, value)
        for part in parts
        if part.model_type == kind
        for name, value in vars(part).items()
        if name.startswith(prefix)
    ]
    for part, name, _ in numbers:
        setattr(part, name, 0)
    for part, name, _ in stages:
        delattr(part, name)
    return numbers + stages


def say_again(said: Said) -> None:
    """Let configurations say what they said before."""
    for part, name, value in said:
        if value is None:
            delattr(part, name)
        else:
            setattr(part, name, value)


@contextmanager
def _says_none(base: Any) -> Iterator[None]:
    said = say_none(base)
    try:
        yield
    finally:
        say_again(said)


def save_beside(heads: ExtraHeads, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Let heads write what belongs beside a model, given their tensors by the model's names; for one process alone."""
    heads.export_beside(folder, {name.removeprefix(BELOW): one.detach().cpu() for name, one in tensors.items()})


def saves_heads(base: nn.Module) -> None:
    """Let a model's own ``save_pretrained`` write its extra heads, too.

    It is no bound method: a pickle would hold the name of one alone, which a copy would find in its class.
    """
    vars(base)["save_pretrained"] = partial(save_pretrained, base)


def saves_plainly(base: nn.Module) -> None:
    """Give a model its class's ``save_pretrained`` back. Nothing but the model knows that it had another one."""
    if getattr(vars(base).get("save_pretrained"), "func", None) is save_pretrained:
        del vars(base)["save_pretrained"]
