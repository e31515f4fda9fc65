"""Read the annotated schema, refuse what is wrong with it, and turn it into the records the generators use."""

from __future__ import annotations

import builtins
import json
import keyword
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema

from torchturbo.config.keys import Alias, Condition, Deprecation, Key, Rule, Section
from torchturbo.config.launch import Launch

Schema = dict[str, Any]

RUNTIME = "RuntimeArgs"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class SchemaError(Exception):
    """The schema breaks its dialect or contradicts itself; the text has one line a problem, each naming the key."""


@dataclass(frozen=True)
class Source:
    """The schema as one model: sections, keys in the schema's order, inputs in the order of the public table."""

    schema: Schema
    sections: tuple[Section, ...]
    keys: tuple[Key, ...]
    rules: tuple[Rule, ...]
    positions: dict[str, int]
    """Place of a key or section in the public table, by path."""

    @classmethod
    def load(cls, path: Path, meta_path: Path) -> Source:
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
        problems = list(_contradictions(source))
        if problems:
            raise SchemaError("\n".join(problems))
        return source

    @cached_property
    def by_path(self) -> dict[str, Key]:
        """Keys by their path."""
        return {key.path: key for key in self.keys}

    @cached_property
    def flag_prefix(self) -> str:
        """What every command line option of ours begins with."""
        return _common_prefix([key.cli for key in self.keys if key.cli])

    @cached_property
    def variable_prefix(self) -> str:
        """What every environment variable of ours begins with."""
        return _common_prefix([key.env for key in self.keys if key.env])

    @property
    def help_flag(self) -> str:
        """The one option that is no key."""
        return f"{self.flag_prefix}help"

    @property
    def inputs(self) -> list[Key | Section]:
        """Everything with a spec, in the order of the public table; what has no position follows in the schema's."""
        listed: list[Key | Section] = [key for key in self.keys if not key.launch_only]
        listed += [section for section in self.sections if section.arg]
        return sorted(listed, key=lambda item: self.positions.get(item.path, 10**6))


def _common_prefix(names: list[str]) -> str:
    """Return everything up to the last underscore that all names share."""
    first, last = min(names), max(names)
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: first[:length].rindex("_") + 1]


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


def _contradictions(source: Source) -> Iterator[str]:
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
