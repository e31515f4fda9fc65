"""What a dense target's draft is planned from: its settings are checked, and where it has weights, their names."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from torchturbo.objectives.dspark import files
from torchturbo.objectives.heads import ExtraHeads
from torchturbo.objectives.planned import Planned, Stored

REMEDY = "write what DeepSpec's draft configurations have, or leave MTP off"


def find(base: Any, stored: Stored) -> Planned | None:
    """Return the draft of a target of one of the families that the table has; None where nothing speaks of one."""
    try:
        found = files.find(base)
    except ValueError as error:
        return Planned("a DSpark draft", obstacle=f"dspark/config.json can't be read: {error}", remedy=REMEDY)
    if found is None:
        return None
    kind = f"a DSpark draft ({found.place})"
    if wrong := files.problems(base.config, found):
        return Planned(kind, obstacle="; ".join(wrong), remedy=REMEDY)
    config = files.draft_config(base.config, found)
    held = [] if found.folder is None else files.weights(base.config)
    if found.folder is not None and (wrong := files.unlike_files(_outline(config), held)):
        return Planned(kind, obstacle="; ".join(wrong), remedy="use the whole draft, as DeepSpec saves it")
    return Planned(kind, partial(_built, config, tuple(held)), made_new=not held)


def _outline(config: Any) -> nn.Module:
    from torchturbo.objectives.dspark.draft import DenseDraft

    with torch.device("meta"):
        return DenseDraft(config)


def _built(config: Any, weights: Any, base: nn.Module) -> ExtraHeads:
    from torchturbo.objectives.dspark.draft import DenseDraft

    return DenseDraft(config, weights)
