"""The live keys that show only on several ranks: two values of each, and what two ranks then do differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import tiny
from ranks import run_ranks


def settings(path: str, value: Any, **others: Any) -> Any:
    """Return a configuration with one key set by its path, beside other sections."""
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return parity.config(**(others | tree))


def on_two_ranks(path: str, look: Callable[..., Any], **others: Any) -> Callable[[Any, Path], Any]:
    """Return an observation of what ``look(rank, configuration)`` sees on two ranks."""

    def observe(value: Any, folder: Path) -> Any:
        return run_ranks(2, look, settings(path, value, **others))

    return observe


def gathered_after_forward(rank: int, configuration: Any) -> bool:
    """Return whether a layer's parameters are whole after a forward pass."""
    from torch.distributed.tensor import DTensor

    model = tiny.model()
    parity.prepared(model, configuration, 2, rank)
    loss = model(**parity.batches(1)[0]).loss
    whole = not isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    loss.backward()
    return whole


RANKED: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "backend_config.reshard_after_forward": (
        True,
        False,
        on_two_ranks("backend_config.reshard_after_forward", gathered_after_forward),
    ),
}
