"""Step: multi-token prediction. The extra heads' losses are added to the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return what is wrong."""
    return []


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Install it."""


def undo(model: nn.Module) -> None:
    """Take it out again."""
