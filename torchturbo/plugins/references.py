"""References inside a JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def at(reference: str, schema: Any) -> Any:
    """Return what a reference ``#/...`` leads to by its JSON Pointer (RFC 6901), or None."""
    for step in reference.removeprefix("#").split("/")[1:]:
        if isinstance(schema, Mapping):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~"))
        elif isinstance(schema, list | tuple) and step.isdigit() and int(step) < len(schema):
            schema = schema[int(step)]
        else:
            return None
    return schema


def followed(reference: str, schema: Any) -> Any:
    """Return what a reference by pointer leads to; None for one by name, and for one to elsewhere."""
    return at(reference, schema) if reference == "#" or reference.startswith("#/") else None
