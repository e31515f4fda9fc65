"""Observer: says once which trained parameters the loss does not reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchturbo.logging import get_logger
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Run

SHOWN_NAMES = 3
log = get_logger(__name__)


class UnusedParameters(Plugin):
    """Looks at the gradients just before the first optimizer step; a parameter without one keeps its value.

    A tower whose last layer the model never reads has some (LLaVA takes the features of the layer before), and a
    model that was put together wrongly has more than anyone meant.
    """

    name = "unused parameters"

    def __init__(self) -> None:
        super().__init__()
        self._looked = False
        self._handle: Any = None

    def optimizer_built(self, optimizer: Optimizer, run: Run) -> None:
        """Look once at the gradients that the first step finds."""

        def look(*_: Any) -> None:
            if not self._looked:
                self._looked = True
                report(run.model)

        self._handle = optimizer.register_step_pre_hook(look)

    def step_end(self, run: Run) -> None:
        """Go, but not while the optimizer walks through its hooks: there may be others."""
        if self._looked:
            self._remove()

    def end(self, run: Run) -> None:
        """Go, where the run failed before its first step."""
        self._remove()

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def report(model: Any) -> None:
    """Log the trained parameters that have no gradient."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = [name for name, parameter in trained if parameter.grad is None]
    if unused:
        more = f" and {len(unused) - SHOWN_NAMES} more" if len(unused) > SHOWN_NAMES else ""
        log.warning_rank0(
            "%d of %d trained parameters got no gradient in the first step, which left them as they were: %s%s",
            len(unused),
            len(trained),
            ", ".join(unused[:SHOWN_NAMES]),
            more,
        )


def observer(config: EngineConfig) -> UnusedParameters:
    """Return the observer; it needs no key."""
    return UnusedParameters()
