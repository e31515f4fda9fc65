"""What is wrong with a schema that its dialect cannot say: names taken twice, values that do not fit, loose ends."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

from codegen.model import Schema, Source
from torchturbo.config.keys import Key, Rule
from torchturbo.config.launch import Launch

RUNTIME = "RuntimeArgs"
"""Name of the definition that holds the inputs of a launch."""
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def contradictions(source: Source) -> Iterator[str]:
    """Yield what a JSON Schema of the dialect cannot say."""
    yield from _duplicates(source)
    yield from _names(source)
    for key in source.keys:
        yield from _misfits(source, key)
        yield from _dangling(source, key)
    for section in source.sections:
        body = source.schema["$defs"].get(section.class_name)
        if section.path and body and "rules" in body["x-torchturbo"]:
            yield f"{section.path}: rules stand at the top of the schema"
        if section.path and (body is None or body["x-torchturbo"]["class"] != section.class_name):
            yield f"{section.path}: the definition and its class must have one name, {section.class_name}"
    used = {section.class_name for section in source.sections} | {RUNTIME}
    for name in source.schema["$defs"].keys() - used:
        yield f"{name}: no $ref leads here"
    for rule in source.rules:
        yield from _rule_problems(source, rule)


def _duplicates(source: Source) -> Iterator[str]:
    seen: dict[str, str] = {source.help_flag: "the help option"}

    def take(kind: str, value: str | None, owner: str) -> Iterator[str]:
        if value is not None:
            # Flags, variables and paths can be told apart by their spelling; fields and names look like paths.
            other = seen.setdefault(f"name {value}" if kind in ("field", "name") else value, owner)
            if other != owner:
                yield f"{owner}: {kind} {value} is already taken by {other}"

    for key in source.keys:
        if source.by_path[key.path] is not key:
            yield f"{RUNTIME}.{key.path}: an input of a launch cannot have a key's name"
        yield from take("flag", key.cli, key.path)
        yield from take("variable", key.env, key.path)
        yield from take("field" if key.arg else "name", key.name, key.path)
        yield from take("path", key.path, key.path)
        for alias in key.aliases:
            for kind, value in (("flag", alias.cli), ("variable", alias.env), ("path", alias.path)):
                yield from take(kind, value, f"an alias of {key.path}")
    for section in source.sections:
        yield from take("field", section.arg, section.path)
        yield from take("class", section.class_name, section.path or "top level")
    by_position: dict[int, str] = {}
    for path, position in source.positions.items():
        if (other := by_position.setdefault(position, path)) != path:
            yield f"{path}: position {position} is already taken by {other}"


def _names(source: Source) -> Iterator[str]:
    # datamodel-code-generator renames these silently, and a dataclass field would shadow them.
    reserved = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, "field", "dataclass"}
    fields = {part for key in source.keys for part in (*key.path.split("."), key.arg or "")} | {
        section.arg or "" for section in source.sections
    }
    for name in sorted(fields & reserved):
        yield f"{name}: a Python keyword or builtin cannot name a key"
    mixin = {"runtime", "provenance", "overridden", "get", "origin", "changed"}
    for name in sorted(mixin & set(source.sections[0].names)):
        yield f"{name}: EngineConfig has a member of that name"
    for key in source.keys:
        if key.arg == "config_overrides" or hasattr(Launch, key.arg or "-"):
            yield f"{key.path}: arg: TorchTurboArgs has a member {key.arg} of its own"


def _misfits(source: Source, key: Key) -> Iterator[str]:
    """Yield values written beside a key that its own schema refuses."""
    if key.pattern:
        try:
            re.compile(key.pattern)
        except re.error as reason:
            yield f"{key.path}: pattern: {reason}"
            return
        if not key.form:
            yield f"{key.path}: form: an item with a pattern says in words how it is written"
    body = next(body for path, body in _leaves(source.schema) if path == key.path)
    own = {name: body[name] for name in ("type", "enum", "minimum", "maximum", "items") if name in body}
    validator = jsonschema.Draft202012Validator(own)
    written = [("default", key.default), *(("examples", value) for value in key.examples)]
    if key.arg_default is not None:
        written.append(("arg_default", key.arg_default))
    for kind, value in written:
        if kind == "default" and value is None and not key.nullable:
            yield f"{key.path}: default: null needs a type that allows null"
        for error in validator.iter_errors(value):
            yield f"{key.path}: {kind}: {error.message}"
        if key.type == "number" and type(value) is int:
            yield f"{key.path}: {kind}: write {float(value)}, so that the generated default is a float"
        if key.type == "integer" and type(value) is float:
            yield f"{key.path}: {kind}: write {int(value)}, so that the generated default is an integer"
    for value in key.idle_silent:
        if not validator.is_valid(value):
            yield f"{key.path}: idle_silent: {value!r} is no value of this key"
    if key.choices and set(body["x-torchturbo"]["values"]) != set(key.choices):
        yield f"{key.path}: values: expected one text for each of {', '.join(key.choices)}"
    if key.nullable and key.choices and None not in body["enum"]:
        yield f"{key.path}: enum: a key that takes null lists null"
    if (key.type == "array") != (key.action == "append"):
        yield f"{key.path}: action: append belongs to lists, and every list needs it"
    if (key.minimum is not None or key.maximum is not None) and key.type not in ("integer", "number"):
        yield f"{key.path}: minimum and maximum belong to numbers"
    if key.choices and key.type != "string":
        yield f"{key.path}: enum: only texts are listed"
    if key.cli and not (key.metavar or key.choices):
        yield f"{key.path}: metavar: the help of an option names its value, or lists the enum"
    if not key.runtime and (key.launch_only or key.type == "array"):
        yield f"{key.path}: lists and launcher options belong to {RUNTIME}"


def _leaves(schema: Schema) -> Iterator[tuple[str, Schema]]:
    def walk(body: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
        for name, child in body["properties"].items():
            if "$ref" in child:
                yield from walk(schema["$defs"][child["$ref"].removeprefix("#/$defs/")], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    yield from walk(schema, "")
    yield from walk(schema["$defs"][RUNTIME], "")


def _dangling(source: Source, key: Key) -> Iterator[str]:
    """Yield references of a key's annotations to keys or values that do not exist."""
    for condition in key.active_when:
        other = source.by_path.get(condition.path)
        if other is None or other.runtime:
            yield f"{key.path}: active_when: there is no key {condition.path}"
        elif other is key:
            yield f"{key.path}: active_when: a key cannot switch itself"
        elif condition.minimum is None:
            for value in condition.allowed:
                fits = value in other.choices if other.choices else _is_json_type(value, other)
                if not fits:
                    yield f"{key.path}: active_when: {condition.path} never has the value {value!r}"
        elif other.type not in ("integer", "number"):
            yield f"{key.path}: active_when: {condition.path} is no number"
    if key.deprecated and key.deprecated.successor:
        if key.deprecated.successor not in source.by_path:
            yield f"{key.path}: deprecated: there is no key {key.deprecated.successor}"
        elif key.deprecated.successor == key.path:
            yield f"{key.path}: deprecated: a key cannot succeed itself"
    sections = {section.path for section in source.sections}
    for alias in key.aliases:
        if alias.path and key.runtime:
            yield f"{key.path}: aliases: an input of a launch stands in no file, under no name"
        elif alias.path and (alias.path in sections or alias.path.rpartition(".")[0] not in sections):
            yield f"{key.path}: aliases: {alias.path} lies in no section, or is one"


def _is_json_type(value: Any, key: Key) -> bool:
    types: dict[str, tuple[type, ...]] = {
        "boolean": (bool,),
        "integer": (int,),
        "number": (int, float),
        "string": (str,),
    }
    return (value is None and key.nullable) or (
        isinstance(value, types.get(key.type, ())) and (key.type == "boolean") == isinstance(value, bool)
    )


def _rule_problems(source: Source, rule: Rule) -> Iterator[str]:
    name = f"rule {rule.left} {rule.op} {rule.right}"
    sides = [source.by_path.get(path) for path in (rule.left, rule.right)]
    for path, key in zip((rule.left, rule.right), sides, strict=True):
        if key is None or key.runtime:
            yield f"{name}: there is no key {path}"
        elif key.type not in ("integer", "number"):
            yield f"{name}: {path} is no number"
    left, right = sides
    if left and right and None not in (left.default, right.default):
        try:
            kept = COMPARE[rule.op](left.default, right.default)
        except TypeError:
            return
        if not kept:
            yield f"{name}: the defaults break it"
