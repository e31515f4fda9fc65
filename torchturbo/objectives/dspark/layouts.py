"""Layouts: which models can have a DSpark draft, and what finds it. The documentation's support table is made of it.

Add a layout: one row of :data:`LAYOUTS`, with a function that says what is built for a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torchturbo.objectives.planned import Planned, Stored

DENSE = "torchturbo.objectives.dspark.dense:find"


class Layout(NamedTuple):
    """One family of targets."""

    name: str
    model_type: str
    """Transformers' name of the target."""
    find: str = DENSE
    """``package.module:function`` of ``(base, stored)`` that returns the plan of a draft; None if none is asked for."""


LAYOUTS: tuple[Layout, ...] = (
    Layout("DeepSeek-V4, stages under mtp.*", "deepseek_v4", "torchturbo.objectives.dspark.deepseek_v4:find"),
    Layout("Llama, with DeepSpec's Qwen3 draft", "llama"),
    Layout("Mistral, with DeepSpec's Qwen3 draft", "mistral"),
    Layout("Qwen2, with DeepSpec's Qwen3 draft", "qwen2"),
    Layout("Qwen3, with DeepSpec's Qwen3 draft", "qwen3"),
)
"""A draft of a dense target takes no part in the target but for its layers' outputs, embeddings and head; those of
these families are plain (no scale at embeddings or logits, no soft cap)."""


def find(base: Any, stored: Stored) -> Planned | None:
    """Return the draft that a Transformers model is to get; None for one that has no DSpark fields."""
    kind = getattr(base.config, "model_type", "")
    for layout in LAYOUTS:
        if layout.model_type == kind:
            module, _, name = layout.find.partition(":")
            planned: Planned | None = getattr(import_module(module), name)(base, stored)
            return planned
    return _refused(base)


def _refused(base: Any) -> Planned | None:
    """Return why a target of another family can't have a draft, where something speaks of one."""
    from torchturbo.objectives.dspark import files
    from torchturbo.objectives.planned import Planned

    place = files.speaks(base)
    if place is None:
        return None
    families = ", ".join(layout.model_type for layout in LAYOUTS if layout.find == DENSE)
    kind = getattr(base.config, "model_type", type(base).__name__)
    obstacle = f"drafts were tried on {families} alone, and not on {kind}"
    return Planned(f"a DSpark draft ({place})", obstacle=obstacle, remedy="leave MTP off")
