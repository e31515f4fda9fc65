"""Read the annotated schema, refuse what is wrong with it, and turn it into the records the generators use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from codegen.contradictions import RUNTIME, contradictions
from codegen.model import Schema, Source
from torchturbo.config.keys import Alias, Condition, Deprecation, Key, Rule, Section


class SchemaError(Exception):
    """The schema breaks its dialect or contradicts itself; the text has one line a problem, each naming the key."""


def read_source(path: Path, meta_path: Path) -> Source:
    """Read and check the schema.

    Raises
    ------
    SchemaError
        With every problem found. Problems of the dialect come alone, because nothing behind them can be trusted.
    """
    schema = _read(path)
    problems = list(_dialect_problems(schema, _read(meta_path)))
    if problems:
        raise SchemaError("\n".join(problems))
    source = _build(schema)
    problems = list(contradictions(source))
    if problems:
        raise SchemaError("\n".join(problems))
    return source


def _read(path: Path) -> Schema:
    def unique(pairs: list[tuple[str, Any]]) -> Schema:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            raise SchemaError(f"{path.name}: {next(name for name in names if names.count(name) > 1)}: key given twice")
        return table

    try:
        loaded: Schema = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise SchemaError(f"{path.name}:{error.lineno}:{error.colno}: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path.name}: {error}") from error
    if not isinstance(loaded, dict):
        raise SchemaError(f"{path.name}: expected an object")
    return loaded


def _dialect_problems(schema: Schema, meta: Schema) -> Iterator[str]:
    seen = set()
    for error in jsonschema.Draft202012Validator(meta).iter_errors(schema):
        # if/then/else reports the whole subschema; its causes say what is wrong with the key itself.
        for cause in error.context or [error]:
            where = _where(list(cause.absolute_path) or list(error.absolute_path))
            message = cause.message
            if cause.validator == "not":  # jsonschema prints the whole value and the whole schema
                message = cause.schema.get("$comment", message)
            line = f"{where}: {message if len(message) < 300 else message[:300] + ' ...'}"
            if line not in seen:
                seen.add(line)
                yield line


def _where(steps: list[str | int]) -> str:
    """Return a place in the schema as a maintainer names it: ``MTPConfig.enabled (x-torchturbo.cli)``."""
    names = [str(step) for step in steps]
    owner = ""
    if names[:1] == ["$defs"] and len(names) > 1:
        owner, names = names[1], names[2:]
    if names[:1] == ["properties"] and len(names) > 1:
        owner, names = ".".join(part for part in (owner, names[1]) if part), names[2:]
    return f"{owner} ({'.'.join(names)})" if owner and names else owner or ".".join(names) or "top level"


def _build(schema: Schema) -> Source:
    sections: list[Section] = []
    keys: list[Key] = []
    positions: dict[str, int] = {}

    def walk(body: Schema, path: str, inside: tuple[str, ...] = ()) -> None:
        notes = body["x-torchturbo"]
        names = tuple(body["properties"])
        section = Section(path=path, class_name=notes["class"], text=body["description"], names=names)
        if "arg" in notes:
            section.arg = notes["arg"]
        sections.append(section)
        if "position" in notes:
            positions[path] = notes["position"]
        for name, child in body["properties"].items():
            child_path = f"{path}.{name}" if path else name
            if "$ref" in child:
                target = child["$ref"].removeprefix("#/$defs/")
                if target not in schema["$defs"]:
                    raise SchemaError(f"{child_path}: $ref to {target}, which does not exist")
                if target in inside:
                    raise SchemaError(f"{child_path}: $ref to {target}, which contains it")
                walk(schema["$defs"][target], child_path, (*inside, target))
            else:
                add(child_path, child, runtime=False)

    def add(path: str, body: Schema, *, runtime: bool) -> None:
        keys.append(_key(path, body, runtime=runtime))
        if "position" in body["x-torchturbo"]:
            positions[path] = body["x-torchturbo"]["position"]

    walk(schema, "")
    for name, body in schema["$defs"][RUNTIME]["properties"].items():
        if "$ref" in body:
            raise SchemaError(f"{RUNTIME}.{name}: inputs of a launch are scalars or lists")
        add(name, body, runtime=True)
    rules = tuple(Rule(**rule) for rule in schema["x-torchturbo"].get("rules", ()))
    return Source(schema, tuple(sections), tuple(keys), rules, positions)


def _key(path: str, body: Schema, *, runtime: bool) -> Key:
    notes = body["x-torchturbo"]
    types = body["type"] if isinstance(body["type"], list) else [body["type"]]
    values = notes.get("values", {})
    items = body.get("items", {})
    return Key(
        path=path,
        type=types[0],
        text=body["description"],
        default=body["default"],
        since=notes["since"],
        name=notes.get("arg") or notes.get("name") or path.replace(".", "_"),
        nullable="null" in types,
        null=notes.get("null", ""),
        choices=tuple(value for value in body.get("enum", ()) if value is not None),
        values=tuple(values.values()),
        minimum=body.get("minimum"),
        maximum=body.get("maximum"),
        pattern=items.get("pattern"),
        form=notes.get("form", ""),
        examples=tuple(body["examples"]),
        arg=notes.get("arg"),
        arg_default=notes.get("arg_default"),
        cli=notes.get("cli"),
        env=notes.get("env"),
        metavar=notes.get("metavar"),
        action=notes.get("action"),
        python=notes.get("python"),
        spec_choices=notes.get("choices", False),
        runtime=runtime,
        launch_only=notes.get("launch_only", False),
        active_when=tuple(_condition(*item) for item in notes.get("active_when", {}).items()),
        idle_silent=tuple(notes.get("idle_silent", ())),
        aliases=tuple(Alias(**alias) for alias in notes.get("aliases", ())),
        deprecated=Deprecation(**notes["deprecated"]) if "deprecated" in notes else None,
        strict_on_resume=notes.get("resume") == "strict",
    )


def _condition(path: str, body: Schema) -> Condition:
    if "minimum" in body:
        return Condition(path=path, minimum=body["minimum"])
    return Condition(path=path, allowed=tuple(body["enum"]) if "enum" in body else (body["const"],))
