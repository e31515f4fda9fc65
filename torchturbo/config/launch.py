"""What a parse knows beyond the public fields of TorchTurboArgs."""

from __future__ import annotations

from torchturbo.config.values import Values
from torchturbo.errors import Problem


class Launch(Values):
    """Base of TorchTurboArgs: attributes that are no fields, so that the fields stay the public table's."""

    resume_allow: tuple[str, ...] = ()
    """Settings that may differ from a resumed checkpoint's."""
    warnings: tuple[Problem, ...] = ()
    """What the command line deserves a warning for; shown when the configuration is built."""
