"""The schema that editors read: plain JSON Schema, with the hover texts of each editor family in its own keywords."""

from __future__ import annotations

import copy
import html
import json
from typing import Any

from codegen.contradictions import RUNTIME
from codegen.model import Schema, Source
from codegen.templates import HEADER
from torchturbo.config.keys import Alias, Key, shown

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(source: Source) -> str:
    """Return the editor schema.

    It allows null for a section, because a section whose lines are all commented out is null and means its
    defaults, and it lists former spellings as deprecated keys, so that an old file is marked but not rejected.
    """
    root = copy.deepcopy(source.schema)
    root["$defs"].pop(RUNTIME)
    for section in source.sections:
        body = root if not section.path else root["$defs"][section.class_name]
        body.pop("x-torchturbo")
        if section.path:
            body["type"] = ["object", "null"]
        for name, child in list(body["properties"].items()):
            path = f"{section.path}.{name}" if section.path else name
            if "$ref" not in child:
                body["properties"][name] = _leaf(child, source.by_path[path])
    for key in source.keys:
        for alias in key.aliases:
            if alias.path:
                _add_alias(root, source, key, alias)
    root = {"$schema": DIALECT, "$comment": HEADER, **{name: body for name, body in root.items() if name != "$schema"}}
    return json.dumps(root, indent=2, ensure_ascii=False) + "\n"


def _leaf(body: Schema, key: Key) -> Schema:
    body.pop("x-torchturbo")
    facts = [("option", key.cli), ("variable", key.env)]
    named = [(word, f"{value}") for word, value in facts if value]
    named.append(("default", shown(key.default)))
    if key.nullable:
        named.append(("null", key.null))
    body["markdownDescription"] = key.text + "\n\n" + "  \n".join(f"{word}: `{value}`" for word, value in named)
    body["x-intellij-html-description"] = (
        html.escape(key.text)
        + "<br><br>"
        + "<br>".join(f"{word}: <code>{html.escape(text)}</code>" for word, text in named)
    )
    if key.choices:
        texts = dict(zip(key.choices, key.values, strict=True))
        body["enumDescriptions"] = [texts.get(value, key.null) for value in body["enum"]]
        body["x-intellij-enum-metadata"] = {value: {"description": text} for value, text in texts.items()}
    if key.deprecated:
        successor = f"; use {key.deprecated.successor}" if key.deprecated.successor else ""
        body["deprecated"] = True
        body["deprecationMessage"] = f"Goes away in {key.deprecated.removal}{successor}."
    return body


def _add_alias(root: Schema, source: Source, key: Key, alias: Alias) -> None:
    assert alias.path is not None
    section, _, name = alias.path.rpartition(".")
    holder: dict[str, Any] = root
    if section:
        holder = root["$defs"][next(item.class_name for item in source.sections if item.path == section)]
    holder["properties"][name] = {
        **{
            word: value
            for word, value in source_leaf(root, source, key).items()
            if word in ("type", "enum", "minimum", "maximum")
        },
        "description": f"Former name of {key.path}.",
        "deprecated": True,
        "deprecationMessage": f"Renamed to {key.path} in {alias.since}; read until {alias.removal}.",
        "doNotSuggest": True,
    }


def source_leaf(root: Schema, source: Source, key: Key) -> Schema:
    """Return a key's body in an editor schema."""
    holder: dict[str, Any] = root
    if key.section:
        holder = root["$defs"][next(item.class_name for item in source.sections if item.path == key.section)]
    leaf: Schema = holder["properties"][key.path.rpartition(".")[2]]
    return leaf
