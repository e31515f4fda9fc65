"""The JSON Schema that a plugin brings for its settings: checked itself, its defaults filled in, its errors in words.

Schemas are read as draft 2020-12 (https://json-schema.org/draft/2020-12). ``format`` is an annotation, as that draft
has it. Nothing is fetched: a ``$ref`` leads into the schema itself or to the draft's own meta-schemas.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from torchturbo.config import scalars
from torchturbo.config.document import Node, Scalar
from torchturbo.config.document.nodes import MAX_DEPTH, MAX_PROBLEMS
from torchturbo.config.keys import Key, shown
from torchturbo.config.names import did_you_mean
from torchturbo.config.scalars import Written, json_type
from torchturbo.errors import Problem, shorten
from torchturbo.plugins.references import at
from torchturbo.plugins.secrets import is_secret
from torchturbo.plugins.settings import Document, dotted, not_finite

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
NAME: Final = "settings_schema"
"""Attribute of a plugin class that holds its schema: what a problem of the schema is told under."""
_BOUNDS: Final = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "pattern": "text that matches {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} keys",
    "maxProperties": "at most {} keys",
}


def schema_problems(schema: Any, place: str) -> list[Problem]:
    """Return what is wrong with a schema itself: no schema of this draft, a ``$ref`` to nowhere, a wrong default."""
    from jsonschema.exceptions import SchemaError

    def wrong(message: str, remedy: str = "", way: str = "") -> list[Problem]:
        return [Problem(place, NAME + way, message, remedy)]

    if not isinstance(schema, Mapping):
        return wrong(f"expected a mapping, got {json_type(schema)}")
    if (draft := schema.get("$schema", DRAFT)) not in (DRAFT, DRAFT + "#"):
        return wrong(f"is written for {shorten(str(draft))}", f"write it for draft 2020-12: {DRAFT}")
    try:
        json.dumps(schema, allow_nan=False)
        _validator(schema).check_schema(schema)
        if lost := [reference for reference in _references(schema) if not _leads(reference, schema)]:
            return wrong(f"its $ref {shorten(lost[0])} leads nowhere")
        for _ in _validator(schema).iter_errors({}):  # meets references that go round in a circle
            pass
        found = list(_wrong_defaults(schema))
    except SchemaError as error:
        way = dotted(tuple(error.absolute_path))
        return wrong(f"is no JSON Schema: {shorten(error.message)}", way=f".{way}" if way else "")
    except RecursionError:
        return wrong("leads back into itself without end", "end a chain of $ref or default somewhere")
    except Exception as error:  # a reference to nowhere, no regular expression, values that JSON does not have
        return wrong(f"is no JSON Schema: {type(error).__name__}: {shorten(' '.join(str(error).split()))}")
    return [problem for way, message in found for problem in wrong(message, way=way)]


def required_keys(schema: Mapping[str, Any]) -> list[str]:
    """Return the keys of the top level that a settings file must give: required ones without a default."""
    return [name for name in schema.get("required", ()) if name not in filled({}, schema)]


def check(document: Document, schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Fill a settings file's defaults in and hold it against a schema that is sound itself.

    Returns the completed settings and what is wrong with them, in the order of the file.
    """
    values = filled(document.values, schema)
    problems = not_finite(document)
    if not problems:
        try:
            errors = list(islice(_validator(schema).iter_errors(values), MAX_PROBLEMS))
        except Exception as error:  # of the schema: a reference by name, for example, is followed only here
            message = f"can't be applied: {type(error).__name__}: {shorten(' '.join(str(error).split()))}"
            return values, [Problem(document.path, NAME, message, "the plugin's author can mend it")]
        secret = [is_secret(values, schema, tuple(error.absolute_path)) for error in errors]
        placed = [
            item
            for error, is_hidden in zip(errors, secret, strict=True)
            for item in _problems(error, document, is_hidden)
        ]
        problems = [problem for _, problem in sorted(placed, key=lambda item: item[0])]
    return values, problems


def filled(values: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which every absent key has the ``default`` that its schema gives it.

    Keys are looked for under ``properties``, through ``$ref`` inside the schema, at every level that the settings or
    a default (``"default": {}``) have.
    """
    return _filled(copy.deepcopy(dict(values)), schema, schema, 0)


def _filled(values: dict[str, Any], schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise RecursionError
    for name, part in _properties(schema, root).items():
        target = _target(part, root)
        if name not in values:
            default = part.get("default", target.get("default", ...)) if isinstance(part, Mapping) else ...
            if default is ...:
                continue
            values[name] = copy.deepcopy(default)
        if isinstance(values[name], dict):
            values[name] = _filled(values[name], target, root, depth + 1)
    return values


def _properties(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _target(schema, root).get("properties", {})
    return found if isinstance(found, Mapping) else {}


def _target(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a subschema stands for: references inside the schema followed, true and false as nothing."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = at(reference, root)
    return {}


def _references(part: Any) -> Iterator[str]:
    """Yield every reference of a schema, values that only look like one left out."""
    if isinstance(part, Mapping):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for key, value in part.items():
            if key not in ("const", "default", "enum", "examples"):
                yield from _references(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _references(value)


def _leads(reference: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a reference leads somewhere; names (``$anchor``, ``$id``) are left to the validator."""
    if reference.startswith("#/"):
        return at(reference, schema) is not None
    return reference.startswith("#") or "://" not in reference or reference.startswith(DRAFT.rpartition("/")[0])


def _wrong_defaults(schema: Mapping[str, Any], way: str = "", root: Any = None) -> Iterator[tuple[str, str]]:
    root = schema if root is None else root
    for name, part in schema.get("properties", {}).items():
        if not isinstance(part, Mapping):
            continue
        here = f"{way}.properties.{name}"
        if "default" in part:
            default = copy.deepcopy(part["default"])
            if isinstance(default, dict):
                default = _filled(default, part, root, 0)
            for error in _validator(root).evolve(schema=part).iter_errors(default):
                yield f"{here}.default", f"does not fit its own schema: {shorten(error.message)}"
                break
        yield from _wrong_defaults(part, here, root)


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]  # the library's default registry would fetch references

    return Draft202012Validator(schema, registry=REGISTRY)


# ---- errors in words ----


def _problems(error: Any, document: Document, is_hidden: bool) -> Iterator[tuple[tuple[int, int], Problem]]:
    """Yield each problem of one error of jsonschema, with its position for sorting; a hidden value is not shown."""
    steps = tuple(error.absolute_path)
    node = document.node(steps)
    if error.validator == "additionalProperties":
        for name in _unknown(error):
            at = document.key(steps, name)
            remedy = did_you_mean(name, error.schema.get("properties", {})) or _known(error.schema)
            yield _problem(document, at, (*steps, name), "unknown key", remedy)
    elif error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        name = next((name for name in missing if error.message.startswith(repr(name))), missing[0])
        yield _problem(document, node, (*steps, name), "is required and missing", "")
    elif is_hidden:
        yield _problem(document, node, steps, _hidden_words(error), "")
    elif error.validator in ("anyOf", "oneOf") and error.context:
        yield _problem(document, node, steps, f"fits none of what it may be: {_forms(error)}", "")
    else:
        yield _problem(document, node, steps, *_words(error, node))


def _problem(document: Document, node: Node, steps: Any, message: str, remedy: str) -> Any:
    return (node.line, node.column), Problem(document.place(node), dotted(steps), message, remedy)


def _unknown(error: Any) -> list[str]:
    import re

    patterns = error.schema.get("patternProperties", {})
    known = error.schema.get("properties", {})
    return [
        name
        for name in error.instance
        if name not in known and not any(re.search(pattern, name) for pattern in patterns)
    ]


def _known(schema: Mapping[str, Any]) -> str:
    names = ", ".join(schema.get("properties", {}))
    return f"the keys here are {names}" if names else "there are no keys here"


def _words(error: Any, node: Node) -> tuple[str, str]:
    wanted = error.validator_value
    if error.validator == "type":
        types = [wanted] if isinstance(wanted, str) else list(wanted)
        return f"expected {' or '.join(types)}, got {_found(error.instance, node)}", _type_remedy(types, error, node)
    if error.validator in ("enum", "const"):
        choices = [shown(value) for value in (wanted if error.validator == "enum" else [wanted])]
        expected = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
        remedy = did_you_mean(error.instance, choices) if isinstance(error.instance, str) else ""
        return f"expected {expected}, got {_found(error.instance, node)}", remedy
    if error.validator in _BOUNDS:
        words = _BOUNDS[error.validator].format(shown(wanted))
        return f"expected {words}, got {_found(error.instance, node)}", ""
    return shorten(error.message), ""


def _hidden_words(error: Any) -> str:
    """Return what is wrong with a secret: what the library says of it holds the value."""
    wanted = error.validator_value
    if error.validator == "type":
        types = [wanted] if isinstance(wanted, str) else wanted
        return f"expected {' or '.join(types)}, got {json_type(error.instance)}"
    if error.validator in _BOUNDS:
        return f"expected {_BOUNDS[error.validator].format(shown(wanted))}, and is something else"
    return f"does not fit its {error.validator}"


def _forms(error: Any) -> str:
    """Return why each form was refused, the first reason of each."""
    reasons: dict[int, str] = {}
    for inner in error.context:
        reasons.setdefault(inner.schema_path[0], shorten(inner.message))
    return "; ".join(reasons.values())


def _found(value: Any, node: Node) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a section"
    if isinstance(node, Scalar):
        return scalars.found(Written(node.text, node.quoted, in_file=True), value)
    return f"{json_type(value)} {shorten(shown(value))}"  # a default, which no file holds


def _type_remedy(types: list[str], error: Any, node: Node) -> str:
    if not isinstance(node, Scalar) or isinstance(error.instance, dict | list):
        return ""
    plain = [kind for kind in types if kind in ("boolean", "integer", "number")]
    if not plain:
        return "put it in quotes" if "string" in types and error.instance is not None else ""
    key = Key(type=plain[0], nullable="null" in types, cli=None)
    remedy = scalars.remedy(key, Written(node.text, node.quoted, in_file=True))
    return remedy if "default" in error.schema or "default" not in remedy else ""
