"""Planned heads: which extra heads a model can have, decided from its configuration and the names in its files.

Each objective that trains extra heads has a finder. The step "extra heads" asks them in order, and builds what the
first one finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchturbo.objectives.heads import ExtraHeads

Stored = Collection[str] | None
"""Names of the tensors in a model's files; None for a model that came from a configuration alone."""


@dataclass(frozen=True)
class Planned:
    """Extra heads that a model is to get, or why it can't have them."""

    kind: str
    """What they are, as messages call them: ``2 multi-token prediction heads of DeepSeek-V3``."""
    build: Callable[[nn.Module], ExtraHeads] | None = None
    """``(base)`` to the heads of a Transformers model, with parameters on the device and in the number format of
    torch's defaults; the step puts them where the model's are. None where there is an obstacle."""
    obstacle: str = ""
    """What keeps the model from having them."""
    remedy: str = ""
    made_new: bool = False
    """Whether heads that the files lack are made anew (a draft that is trained from nothing); else they are missed."""


Finder = Callable[[Any, Stored], Planned | None]
"""``(base, stored)`` to the heads of a Transformers model, on any device; None where the objective knows none for it."""
