"""Write a configuration so that it loads back to the same one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchturbo.config.keys import shown
from torchturbo.config.merge import idle_paths
from torchturbo.generated.keys import KEYS

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig


def to_dict(config: EngineConfig, *, changed_only: bool = False) -> dict[str, Any]:
    """Return the keys of a configuration file as nested dictionaries.

    Inputs of the launch are no part of it. A key that is idle at its default is left out: it would load back
    with a warning that nothing reads it.
    """
    tree: dict[str, Any] = {}
    for path in _written(config, changed_only):
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = config.get(path)
    return tree


def to_yaml(config: EngineConfig, *, changed_only: bool = False) -> str:
    """Return a configuration as the text of a YAML file. Values are scalars only, so no YAML library is needed."""
    lines = list(_lines(to_dict(config, changed_only=changed_only), ""))
    return "\n".join(lines) + "\n" if lines else "# every key has its default\n"


def to_json(config: EngineConfig, *, changed_only: bool = False) -> str:
    """Return a configuration as the text of a JSON file."""
    return json.dumps(to_dict(config, changed_only=changed_only), indent=2) + "\n"


def _written(config: EngineConfig, changed_only: bool) -> list[str]:
    values = {path: config.get(path) for path in KEYS}
    idle = idle_paths(values)
    return [
        path
        for path, key in KEYS.items()
        if not key.runtime and (values[path] != key.default or not (changed_only or path in idle))
    ]


def scalar(value: Any) -> str:
    """Return a value as YAML 1.2 and 1.1 both read it: a float keeps its point, which 1.1 needs before an exponent."""
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        return repr(value) if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
    return shown(value)


def _lines(tree: Mapping[str, Any], indent: str) -> Any:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {scalar(value)}"
