"""What a dense target's draft is planned from: its settings are checked, and where it has weights, their names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torchturbo.checkpoint.slices import Stored as Tensors
from torchturbo.errors import shorten
from torchturbo.objectives.dspark import files, settings
from torchturbo.objectives.heads import ExtraHeads
from torchturbo.objectives.planned import Planned, Stored

REMEDY = "write what DeepSpec's draft configurations have, or leave MTP off"
WHOLE = "use the whole draft, as DeepSpec saves it"
SHOWN = 200
"""Characters that an obstacle shows of another library's error."""


def find(base: Any, stored: Stored) -> Planned | None:
    """Return the draft of a target of one of the families that the table has; None where nothing speaks of one."""
    try:
        found = files.find(base)
    except ValueError as error:
        return Planned("a DSpark draft", obstacle=str(error), remedy=REMEDY)
    if found is None:
        return None
    kind = f"a DSpark draft ({found.place})"
    wrong, held, damaged = settings.problems(base.config, found), dict[str, Tensors](), list[str]()
    if found.folder is not None:
        try:
            held = files.weights(base.config)
            damaged = files.other_layers(found.said.get("num_hidden_layers"), held)
        except ValueError as error:
            damaged = [str(error)]
    if not wrong and not damaged:
        try:
            return _planned(kind, base, found, held)
        except Exception as error:  # Transformers' and torch's own checks raise errors of many kinds
            text = " ".join(f"{type(error).__name__}: {error}".split())
            wrong = [f"expected settings of a Qwen3 model, and Transformers says {shorten(text, SHOWN)}"]
    return Planned(kind, obstacle="; ".join([*wrong, *damaged]), remedy=REMEDY if wrong else WHOLE)


def _planned(kind: str, base: nn.Module, found: files.Found, held: Mapping[str, Tensors]) -> Planned:
    """Return the draft that settings make, if its weights and its size fit; nothing has memory yet."""
    config = settings.draft_config(base.config, found)
    outline = _outline(config)
    if found.folder is None:
        wrong, remedy = _larger(outline, base), REMEDY
    else:
        wrong, remedy = files.unlike_files(outline, held), WHOLE
    if wrong:
        return Planned(kind, obstacle="; ".join(wrong), remedy=remedy)
    _turn(config)
    weights = tuple(sorted({tensor.file for tensor in held.values()}))
    return Planned(kind, partial(_built, config, weights), made_new=not weights)


def _outline(config: Any) -> nn.Module:
    from torchturbo.objectives.dspark.draft import DenseDraft

    with torch.device("meta"):
        return DenseDraft(config)


def _larger(draft: nn.Module, base: nn.Module) -> list[str]:
    """Return a problem for a new draft with more parameters than its target, which could only slow it down."""
    own, most = (sum(one.numel() for one in module.parameters()) for module in (draft, base))
    return [f"its sizes make {own:,} parameters, expected at most the target's {most:,}"] if own > most else []


def _turn(config: Any) -> None:
    """Compute one position's cosines and sines, by which a draft's heads must turn as a whole."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    cos, _ = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))
    if cos.shape[-1] != config.head_dim:
        message = f"rope_parameters turn {cos.shape[-1]} of the {config.head_dim} numbers of a head, expected all"
        raise ValueError(message)


def _built(config: Any, weights: Any, base: nn.Module) -> ExtraHeads:
    from torchturbo.objectives.dspark.draft import DenseDraft

    return DenseDraft(config, weights)
