"""What optimizers keep for each parameter, by class: one table for plans and for the offload of their state; no torch.

Sources: ``torch/optim/*.py`` (``state`` of each class), :mod:`torchturbo.optim.muon`, optimi's ``stableadamw.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """What an optimizer keeps for a parameter."""

    copies: int
    """Tensors of the parameter's shape."""
    scalars: int
    """Single numbers, fp32."""


def _moments(group: Mapping[str, Any]) -> Kept:
    return Kept(2 + bool(group.get("amsgrad")), 1)


def _momentum(group: Mapping[str, Any]) -> Kept:
    return Kept(int(bool(group.get("momentum"))), 0)


def _rmsprop(group: Mapping[str, Any]) -> Kept:
    return Kept(1 + bool(group.get("momentum")) + bool(group.get("centered")), 1)


KEPT: Mapping[str, Callable[[Mapping[str, Any]], Kept]] = {
    "Adam": _moments,
    "AdamW": _moments,
    "StableAdamW": _moments,
    "NAdam": lambda group: Kept(2, 2),
    "RAdam": lambda group: Kept(2, 1),
    "Adamax": lambda group: Kept(2, 1),
    "Adadelta": lambda group: Kept(2, 1),
    "Adagrad": lambda group: Kept(1, 1),
    "RMSprop": _rmsprop,
    "SGD": _momentum,
    "Muon": lambda group: Kept(1, 0),
    "Lion": lambda group: Kept(1, 0),
}
"""By the class's name, from the settings of a parameter group. The state of others is factored or quantised."""
NAMES: Mapping[str, str] = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "stable_adamw": "StableAdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
"""Class of each optimizer that Transformers has a name for (``--optim``)."""


def kept(classes: Iterable[str], group: Mapping[str, Any]) -> Kept | None:
    """Return what an optimizer keeps for each parameter of a group.

    Parameters
    ----------
    classes
        Names of its class and of what that derives from, the nearest first.
    group
        The group's settings; those that are missing are off.

    Returns
    -------
    Kept | None
        None where no class is known.

    """
    if group.get("use_muon"):  # torchturbo.optim.muon: one optimizer of both kinds
        return KEPT["Muon"](group)
    known = next((KEPT[name] for name in classes if name in KEPT), None)
    return None if known is None else known(group)
