"""A plugin's settings file: values by YAML's core schema, every error with its place, the schema checked first."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchturbo.plugins import Plugin
from torchturbo.plugins.schema import check, filled, required_keys, schema_problems
from torchturbo.plugins.settings import read_settings


def read(write: Any, text: str, name: str = "s.yaml") -> tuple[Any, list[str]]:
    write(name, text)
    document, problems = read_settings(name)
    return document and document.values, list(map(str, problems))


def held(write: Any, text: str, schema: dict[str, Any], name: str = "s.yaml") -> tuple[Any, list[str]]:
    """Return the completed settings and what is wrong with them."""
    assert [] == schema_problems(schema, "p.py:1")
    write(name, text)
    document, problems = read_settings(name)
    assert document is not None and not problems
    values, problems = check(document, schema)
    return values, list(map(str, problems))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


# ---- plain values ----


def test_values_are_those_of_the_core_schema(write: Any) -> None:
    """YAML 1.2, not 1.1: yes and on are texts, 0o17 is octal, a quoted number is a text."""
    text = """\
        int: 10
        negative: -3
        octal: 0o17
        hex: 0xfF
        float: 1e-5
        dot: .5
        whole: 1.0
        true: True
        no_boolean: yes
        nothing: ~
        empty:
        quoted: "4"
        forced: !!str 4
        block: |
          two
          lines
        list: [1, [a, null]]
        nested: {a: {b: false}}
        underscore: 1_000
        1: a key
    """
    values, problems = read(write, text)

    assert [] == problems
    assert {
        "int": 10, "negative": -3, "octal": 15, "hex": 255, "float": 1e-5, "dot": 0.5, "whole": 1.0, "true": True,
        "no_boolean": "yes", "nothing": None, "empty": None, "quoted": "4", "forced": "4", "block": "two\nlines\n",
        "list": [1, ["a", None]], "nested": {"a": {"b": False}}, "underscore": "1_000", "1": "a key",
    } == values  # fmt: skip
    assert isinstance(values["whole"], float) and isinstance(values["int"], int)


def test_numbers_without_a_finite_value_reach_a_plugin_without_schema(write: Any) -> None:
    """The core schema has them."""
    values, problems = read(write, "a: .inf\nb: -.INF\nc: .nan\n")

    assert ([], math.inf, -math.inf) == (problems, values["a"], values["b"])
    assert math.isnan(values["c"])


def test_json_is_read_as_json(write: Any) -> None:
    values, problems = read(write, '{"a": [1, 2.5, true, null, "x"], "b": {"c": -0}}', "s.json")

    assert ({"a": [1, 2.5, True, None, "x"], "b": {"c": 0}}, []) == (values, problems)


def test_aliases_and_merge_keys_give_values_of_their_own(write: Any) -> None:
    """A plugin that changes one section changes no other."""
    values, _ = read(write, "a: &a {x: [1]}\nb: *a\nc: {<<: *a, y: 2}\n")

    assert {"a": {"x": [1]}, "b": {"x": [1]}, "c": {"y": 2, "x": [1]}} == values
    assert values["a"] is not values["b"] and values["a"]["x"] is not values["c"]["x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("---\n", {}),
        ("{}\n", {}),
    ],
)
def test_an_empty_file_is_an_empty_mapping(text: str, expected: Any, write: Any) -> None:
    assert (expected, []) == read(write, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", "s.yaml:1:1: expected a mapping of settings, got a list; write `key: value` lines"),
        ("word\n", 's.yaml:1:1: expected a mapping of settings, got "word"; write `key: value` lines'),
        ("a: 1\na: 2\n", "s.yaml:2:1: a: key given twice (first at s.yaml:1:1); keep one of the two"),
        ("a: !x 1\n", "s.yaml:1:4: a: unknown tag !x; remove it, or quote a text that starts with !"),
        ("a: &a [*a]\n", "s.yaml:1:8: a[0]: cyclic alias *a: it stands inside the value it means (&a at s.yaml:1:4)"),
        ("a: 1\n---\nb: 1\n", "s.yaml:2:1: a second document starts here; keep one document in a file"),
        ("a: {b: [010]}\n", "s.yaml:1:9: a.b[0]: 010: a number with leading zeros; write 10, or put a text in quotes"),
        (f"a: {'1' * 401}\n", "s.yaml:1:4: a: a number of 401 digits; put a text in quotes"),
    ],
)
def test_what_no_settings_file_can_say(text: str, problem: str, write: Any) -> None:
    """The checks of every configuration file, and what people do not mean by the core schema."""
    assert [problem] == read(write, text)[1]


# ---- held against the schema ----

SCHEMA = closed(
    decay={"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 0.9},
    steps={"type": ["integer", "null"]},
    mode={"enum": ["mean", "median", 3, None]},
    on={"type": "boolean", "default": False},
    name={"type": "string", "minLength": 2, "pattern": "^[a-z]+$"},
    sizes={"type": "array", "items": {"type": "integer", "multipleOf": 8}, "maxItems": 2},
    either={"anyOf": [{"type": "integer"}, {"const": "auto"}]},
    inner={**closed(depth={"type": "integer"}), "required": ["depth"]},
)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("decay: 2\n", ["s.yaml:1:8: decay: expected at most 1, got integer 2"]),
        ("decay: 0\n", ["s.yaml:1:8: decay: expected more than 0, got integer 0"]),
        ('decay: "0.5"\n', ['s.yaml:1:8: decay: expected number, got string "0.5"; remove the quotes']),
        ("decay: null\n", ["s.yaml:1:8: decay: expected number, got null; leave it out for its default"]),
        ("decay: .nan\n", ["s.yaml:1:8: decay: expected a finite number, got .nan"]),
        ("decay: 1e999\n", ["s.yaml:1:8: decay: expected a finite number, got 1e999"]),
        ("steps: 1_000\n", ['s.yaml:1:8: steps: expected integer or null, got string "1_000"; write 1000']),
        ("steps: None\n", ['s.yaml:1:8: steps: expected integer or null, got string "None"; did you mean null?']),
        ("steps: 1.5\n", ["s.yaml:1:8: steps: expected integer or null, got number 1.5; write a whole number"]),
        ("mode: meen\n", ['s.yaml:1:7: mode: expected one of mean, median, 3, null, got string "meen"; did you mean mean?']),
        ("on: yes\n", ['s.yaml:1:5: on: expected boolean, got string "yes"; write true']),
        ("name: 12\n", ["s.yaml:1:7: name: expected string, got integer 12; put it in quotes"]),
        ("name: x\n", ['s.yaml:1:7: name: expected at least 2 characters, got string "x"']),
        ("name: XX\n", ['s.yaml:1:7: name: expected text that matches ^[a-z]+$, got string "XX"']),
        ("sizes: [8, 9]\n", ["s.yaml:1:12: sizes[1]: expected a multiple of 8, got integer 9"]),
        ("sizes: [8, 8, 8]\n", ["s.yaml:1:8: sizes: expected at most 2 items, got a list"]),
        ("sizes: 8\n", ["s.yaml:1:8: sizes: expected array, got integer 8"]),
        ("inner:\n  depht: 1\n", [
            "s.yaml:2:3: inner.depht: unknown key; did you mean depth?",
            "s.yaml:2:3: inner.depth: is required and missing",
        ]),
        ("inner: {depth: null}\n", ["s.yaml:1:16: inner.depth: expected integer, got null"]),
        ("inner: 4\n", ["s.yaml:1:8: inner: expected object, got integer 4"]),
        ("dekay: 1\nzzz: 2\n", [
            "s.yaml:1:1: dekay: unknown key; did you mean decay?",
            "s.yaml:2:1: zzz: unknown key; the keys here are decay, steps, mode, on, name, sizes, either, inner",
        ]),
    ],
)  # fmt: skip
def test_every_error_has_its_place_and_what_to_do(text: str, problems: list[str], write: Any) -> None:
    assert problems == held(write, text, SCHEMA)[1]


def test_what_may_be_several_things_says_why_it_is_none(write: Any) -> None:
    (problem,) = held(write, "either: often\n", SCHEMA)[1]

    assert problem.startswith("s.yaml:1:9: either: fits none of what it may be: ")
    assert "'often' is not of type 'integer'" in problem and "'auto' was expected" in problem


def test_all_errors_are_told_in_the_order_of_the_file(write: Any) -> None:
    problems = held(write, "sizes: [9]\ndecay: 2\nmode: x\nnew: 1\n", SCHEMA)[1]

    assert ["1:9", "2:8", "3:7", "4:1"] == [":".join(problem.split(":")[1:3]) for problem in problems]


def test_json_settings_have_places_too(write: Any) -> None:
    assert ["s.json:2:12: decay: expected at most 1, got integer 2"] == held(
        write, '{\n  "decay": 2\n}', SCHEMA, "s.json"
    )[1]


# ---- defaults ----


def test_absent_keys_get_their_defaults_at_every_level_there_is(write: Any) -> None:
    """Given ones keep their value, null included; a section that is absent and has no default stays absent."""
    schema = {
        **closed(
            a={"type": "integer", "default": 1},
            b={"default": 2},
            made={"type": "object", "default": {}, "properties": {"deep": {"default": [3]}}},
            given={"$ref": "#/$defs/part"},
            absent={"$ref": "#/$defs/part"},
        ),
        "$defs": {"part": {"type": "object", "properties": {"x": {"default": "x"}}}},
    }

    values, problems = held(write, "b: null\ngiven: {}\n", schema)

    assert [] == problems
    assert {"a": 1, "b": None, "made": {"deep": [3]}, "given": {"x": "x"}} == values


def test_defaults_behind_references_of_any_form_are_found() -> None:
    """Escapes and positions of a JSON Pointer."""
    part = {"type": "object", "default": {}, "properties": {"x": {"default": 1}}}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a~1b~0c"}, "b": {"$ref": "#/$defs/list/allOf/0"}},
        "$defs": {"a/b~c": part, "list": {"allOf": [part]}},
    }

    assert [] == schema_problems(schema, "p.py:1")
    assert {"a": {"x": 1}, "b": {"x": 1}} == filled({}, schema)


def test_a_default_is_never_shared() -> None:
    schema = closed(a={"default": [1]})
    filled({}, schema)["a"].append(2)

    assert {"a": [1]} == filled({}, schema)


def test_a_required_key_with_a_default_need_not_be_given(write: Any) -> None:
    schema = {**closed(a={"default": 1}, b={"type": "integer"}), "required": ["a", "b"]}

    assert ["b"] == required_keys(schema)
    assert ({"b": 2, "a": 1}, []) == held(write, "b: 2\n", schema)


def test_without_a_file_the_plugin_still_has_its_defaults() -> None:
    """The mapping it was given is None; what it reads its settings from is not."""

    class Any_(Plugin):
        settings_schema = closed(a={"default": 1}, b={"type": "integer"})

    assert ({"a": 1}, {"b": 2, "a": 1}, {}) == (Any_(None).settings, Any_({"b": 2}).settings, Plugin().settings)


# ---- the schema itself ----


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (True, "p.py:1: settings_schema: expected a mapping, got boolean"),
        ({"type": "objct"}, "p.py:1: settings_schema.type: is no JSON Schema: 'objct' is not valid under any of the given"),
        ({"properties": {"a": {"minimum": "1"}}}, "p.py:1: settings_schema.properties.a.minimum: is no JSON Schema: '1'"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#"},
            "p.py:1: settings_schema: is written for http://json-schema.org/draft-07/schema#; write it for draft 2020-12",
        ),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/no"}}}}, "p.py:1: settings_schema: its $ref #/$defs/no leads nowhere"),
        ({"$ref": "https://example.org/x.json"}, "p.py:1: settings_schema: its $ref https://example.org/x.json leads"),
        ({"$ref": "#"}, "p.py:1: settings_schema: leads back into itself without end"),
        (
            {"properties": {"a": {"type": "integer", "default": "x"}}},
            "p.py:1: settings_schema.properties.a.default: does not fit its own schema: 'x' is not of type 'integer'",
        ),
        (
            {"properties": {"s": {"properties": {"a": {"maximum": 1, "default": 2}}}}},
            "p.py:1: settings_schema.properties.s.properties.a.default: does not fit its own schema: 2 is greater than",
        ),
        (
            {"properties": {"a": {"$ref": "#", "default": {}}}},
            "p.py:1: settings_schema: leads back into itself without end",
        ),
        ({"properties": {"a": {"pattern": "("}}}, "p.py:1: settings_schema.properties.a.pattern: is no JSON Schema: '('"),
        ({"enum": [{1, 2}]}, "p.py:1: settings_schema: is no JSON Schema: TypeError"),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_told_at_its_class(schema: Any, problem: str) -> None:
    """Nothing is fetched from the network for it either."""
    (found,) = map(str, schema_problems(schema, "p.py:1"))

    assert found.startswith(problem)


def test_nothing_is_fetched_for_a_reference(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a name of the schema turns into an address on the network, too."""
    asked: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **more: asked.append(args))
    schema = {"$id": "https://example.org/a.json", **closed(a={"$ref": "b.json"})}

    (problem,) = held(write, "a: 1\n", schema)[1]

    assert problem.startswith("s.yaml: settings_schema: can't be applied: ") and [] == asked


def test_a_fault_deep_in_a_schema_is_told_when_it_is_met(write: Any) -> None:
    """A reference by name, under a key that is checked only where it is given."""
    schema = closed(a={"type": "object", "properties": {"b": {"$ref": "#no"}}})

    (problem,) = held(write, "a: {b: 1}\n", schema)[1]

    assert problem.startswith("s.yaml: settings_schema: can't be applied: ") and "no" in problem
