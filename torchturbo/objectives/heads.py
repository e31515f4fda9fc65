"""Extra heads: the one module, ``mtp``, under which a Transformers model holds what an objective adds to it.

Multi-token prediction and DSpark train layers of their own, which checkpoints keep under names of their own. They
are a child of the model, so that the optimizer, sharding, activation checkpointing and native checkpoints see them
like everything else; loading and exports translate their names by the heads' own tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

NAME = "mtp"
"""Name of the child. It belongs to none of the parts that ``freeze_policy`` freezes."""
BESIDE = "dspark"
"""Folder beside a model's own files that holds the draft of a dense target."""


class ExtraHeads(nn.Module):
    """What an objective adds to a model: layers that are trained, loaded and exported with it.

    A family's heads are a subclass. Its forward is the objective's own affair.
    """

    pattern: re.Pattern[str] | None = None
    """Which tensors of a checkpoint's own files are the heads', by their names there; None where none are."""
    transforms: Sequence[Any] = ()
    """Transformers' ``WeightRenaming`` and ``WeightConverter``: from the heads' tensors in a checkpoint to the names of
    the model, ``mtp.…``, in loading, and back in exports. The family's own table is not asked about these tensors."""
    units: tuple[str, ...] = ()
    """Names, below the heads, of the modules that a sharded model gathers and frees one by one, in the order in which
    they run. Each of them runs in every training forward, on every rank."""
    copies: Mapping[str, str] = {}
    """Tensors of the files that repeat a weight outside of the heads, such as the embeddings: the model's name of that
    weight. They are the heads', too. Nothing is loaded from them; an export writes them where the checkpoint has them."""
    made_new: bool = False
    """Whether heads that the files lack begin as their classes begin; else they are missed."""
    files: Sequence[Path] = ()
    """Safetensors files, beside the model's own, that the heads are read from, by their names below the heads."""
    beside: bool = False
    """Whether exports keep the heads out of the model's own files and hand them to :meth:`export_beside`."""

    def owns(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint belongs to the heads, by its name in the files."""
        return self.pattern is not None and self.pattern.match(name) is not None

    def unlike(self, base: Any) -> str:
        """Return what of a model that has the heads, and was changed since, is not as they need it; empty for nothing.

        It completes "the heads that the model has …".
        """
        return ""

    def export_beside(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the heads into an exported model's folder, in files of their own; called on the first rank alone.

        ``tensors`` are whole, on the CPU, and named as below the heads.
        """


def draft_beside(base: Any) -> str:
    """Return the folder of the draft beside a model that was read from a folder; empty where there is none."""
    source = getattr(getattr(base, "config", None), "_name_or_path", "")
    folder = Path(source, BESIDE) if source else None
    return str(folder) if folder is not None and (folder / "config.json").is_file() else ""


def extra_heads(base: nn.Module) -> ExtraHeads | None:
    """Return a Transformers model's extra heads; None where it has none."""
    found = base._modules.get(NAME)
    return found if isinstance(found, ExtraHeads) else None


def is_of_heads(name: str) -> bool:
    """Return whether a tensor of a model with extra heads is theirs, by its name in the model."""
    return name.startswith(f"{NAME}.")


def attach(base: nn.Module, heads: ExtraHeads) -> None:
    """Make heads a part of a Transformers model.

    Raises
    ------
    ValueError
        The model has something of this name already.

    """
    if hasattr(base, NAME):
        raise ValueError(f"{type(base).__name__} has a {NAME} of its own: {type(getattr(base, NAME)).__name__}")
    base.add_module(NAME, heads)


def detach(base: nn.Module) -> ExtraHeads | None:
    """Take the extra heads out of a model, and return them; nothing happens to a model without any."""
    heads = extra_heads(base)
    if heads is not None:
        del base._modules[NAME]
    return heads
