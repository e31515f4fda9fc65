"""Changes: what the step of an objective that trains extra heads did to a model, and how it is undone."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

from torch import nn

from torchturbo.objectives.taps import Taps


@dataclass
class Changes:
    """What a step did to a model; it keeps neither the model nor its parameters alive."""

    taps: Taps | None = None
    frozen: list[ref[nn.Parameter]] = field(default_factory=list)
    """Parameters that were trained before."""

    def freeze(self, heads: nn.Module) -> None:
        """Take heads out of training: gradients of 0 would let an optimizer's weight decay and momentum move them."""
        self.frozen += [ref(parameter) for parameter in heads.parameters() if parameter.requires_grad]
        heads.requires_grad_(False)

    def undo(self) -> None:
        """Take the taps out of the model, and let what was frozen be trained again."""
        if self.taps is not None:
            self.taps.remove()
        for reference in self.frozen:
            if (parameter := reference()) is not None:
                parameter.requires_grad_(True)
