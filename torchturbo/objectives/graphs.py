"""Compiled graphs: what objectives do beside a model's forward stays out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Return a function that ``torch.compile`` does not trace: it runs between the graphs, as it is written.

    ``torch.compiler.disable`` with the type of what it is given.
    """
    disable: Callable[[Function], Function] = getattr(torch.compiler, "disable")  # noqa: B009  # it has no types
    return disable(function)
