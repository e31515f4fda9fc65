"""What a parse knows beyond the public fields of TorchTurboArgs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torchturbo.config.values import Values
from torchturbo.errors import Problem


class Launch(Values):
    """Base of TorchTurboArgs: attributes that are no fields, so that the fields stay the public table's."""

    launch_options: Mapping[str, Any] = MappingProxyType({})
    """Options of the launcher alone, by the path of their key."""
    warnings: tuple[Problem, ...] = ()
    """What the command line deserves a warning for; shown when the configuration is built."""
