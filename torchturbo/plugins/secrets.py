"""Settings that a plugin's schema marks as ``writeOnly``, such as tokens: in no record of a run and in no message.

A setting counts as secret where any part of the schema that speaks of it says so, also one that applies in other cases
only, and where a reference leads to a part that can't be looked into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchturbo.config.document.nodes import MAX_DEPTH
from torchturbo.plugins.references import followed

_MANY = ("allOf", "anyOf", "oneOf")
_ONE = ("if", "then", "else")


def public(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return settings without the secret ones: their keys are left out, in a list None stands for them.

    Left out, not hashed: a short password could be guessed from its hash, and a renewed token is no other training.
    """
    return _public(value, [schema], schema)


def is_secret(values: Any, schema: Mapping[str, Any], steps: Sequence[str | int]) -> bool:
    """Return whether the value at the end of a way, or anything around or inside it, is secret."""
    parts: list[Any] = [schema]
    for step in steps:
        if _marked(parts, schema):
            return True
        parts = list(_below(parts, step, schema))
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):  # a key that is missing holds nothing
            values = None
    return _marked(parts, schema) or bool(_public(values, parts, schema) != values)


def _public(value: Any, parts: list[Any], root: Mapping[str, Any]) -> Any:
    if _marked(parts, root):
        return None
    if isinstance(value, Mapping):
        below = {name: list(_below(parts, name, root)) for name in value}
        return {
            name: _public(item, below[name], root) for name, item in value.items() if not _marked(below[name], root)
        }
    if isinstance(value, list | tuple):
        return [_public(item, list(_below(parts, at, root)), root) for at, item in enumerate(value)]
    return value


def _marked(parts: Iterable[Any], root: Mapping[str, Any]) -> bool:
    return any(part is None or part.get("writeOnly") is True for part in _in_place(parts, root, 0))


def _in_place(parts: Iterable[Any], root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any] | None]:
    """Yield every part of the schema that speaks of one value; None for one that can't be looked into."""
    for part in parts:
        if not isinstance(part, Mapping):
            continue
        if depth > MAX_DEPTH:
            yield None
            return
        yield part
        for name in ("$ref", "$dynamicRef"):
            if isinstance(reference := part.get(name), str):
                target = followed(reference, root)
                yield from [None] if target is None else _in_place([target], root, depth + 1)
        nested = [item for name in _MANY for item in _listed(part.get(name))]
        nested += [part[name] for name in _ONE if name in part]
        nested += list(_mapping(part.get("dependentSchemas")).values())
        yield from _in_place(nested, root, depth + 1)


def _below(parts: Iterable[Any], step: str | int, root: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every part that speaks of a key's value, or of an item of a list."""
    for part in _in_place(parts, root, 0):
        if part is None:
            continue
        if isinstance(step, int):
            yield from _listed(part.get("prefixItems"))[step : step + 1]
            yield from (part[name] for name in ("items", "contains", "unevaluatedItems") if name in part)
            continue
        properties, patterns = _mapping(part.get("properties")), _mapping(part.get("patternProperties"))
        matching = [patterns[pattern] for pattern in patterns if _matches(pattern, str(step))]
        yield from ([properties[step]] if step in properties else [])
        yield from matching
        if step not in properties and not matching:
            yield from (part[name] for name in ("additionalProperties", "unevaluatedProperties") if name in part)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # of a plugin that code made: nobody has checked its schema
        return True


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
