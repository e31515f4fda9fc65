"""From plugin inputs to plugin objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Plugin


def load_plugins(config: EngineConfig, framework: str) -> tuple[list[Plugin], list[Problem]]:
    """Return the plugins that a configuration names, in its order, and what is wrong with them."""
    return [], []
