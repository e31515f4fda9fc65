"""Finds the weights with which a module computes: not what PEFT keeps beside them and does not use."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn


class Weight(NamedTuple):
    """A parameter and where it is."""

    path: str
    """Its name inside the module that was asked about, without PEFT's wrappers of copied modules."""
    module: nn.Module
    """The module that holds it."""
    tensor: Tensor


def weights_in_use(root: nn.Module) -> Iterator[Weight]:
    """Yield the parameters that a module's forward uses, in the order in which they are registered.

    PEFT keeps the original beside the copy that is trained in its place (``modules_to_save``), and adapters that are
    not active beside those that are.
    """
    return _walk(root, "", set())


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[Weight]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, tensor in module.named_parameters(recurse=False):
        yield Weight(_joined(path, name), module, tensor)
    for name, child in _children(module):
        yield from _walk(child, _joined(path, name), seen)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that a module uses, by name; a copy takes the place of its wrapper, and so has no name."""
    children = dict(module.named_children())
    active = _active_adapters(module)
    if "original_module" in children and isinstance(copies := children.get("modules_to_save"), nn.ModuleDict):
        used = [copies[name] for name in copies if name in active]
        yield from (("", child) for child in used or [children["original_module"]])
        return
    for name, child in children.items():
        if "base_layer" in children and isinstance(child, nn.ModuleDict):
            yield from ((f"{name}.{adapter}", part) for adapter, part in child.items() if adapter in active)
        else:
            yield name, child


def _active_adapters(wrapper: Any) -> Collection[str]:
    if getattr(wrapper, "disable_adapters", False) or getattr(wrapper, "merged", False):
        return ()
    found = getattr(wrapper, "active_adapters", ())
    return found if isinstance(found, list | tuple) else ()  # PEFT's model itself has a method of this name
