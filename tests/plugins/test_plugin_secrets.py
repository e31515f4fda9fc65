"""Settings that a schema marks as writeOnly are in no record and no message; everything else is compared on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plugin_runs import command

from torchturbo.errors import ConfigError
from torchturbo.plugins import Plugin
from torchturbo.plugins.load import plugin_facts
from torchturbo.plugins.schema import check, schema_problems
from torchturbo.plugins.secrets import public
from torchturbo.plugins.settings import read_settings
from torchturbo.train.run import train

CANARY = "canary-91ab"
SECRET = {"type": "string", "writeOnly": True}

PLUGIN = f"""\
from torchturbo.plugins import Plugin, register

@register()
class Sending(Plugin):
    settings_schema = {{"properties": {{"token": {SECRET!r}, "room": {{"type": "string"}}}}}}
    def end(self, run):
        assert self.settings["token"].startswith("canary")
"""


def test_a_token_is_in_no_file_of_a_run(material: Path, tmp_path: Path) -> None:
    """The plugin has it; a resume goes on with a new one, and not with another of the other settings."""
    (tmp_path / "p.py").write_text(PLUGIN)
    settings = tmp_path / "s.yaml"
    settings.write_text(f"token: {CANARY}\nroom: one\n")
    plugin = ["--save_steps", "1", "--tt_plugin", f"{tmp_path}/p.py:{settings}"]
    out = tmp_path / "out"
    train(command(material, out, *plugin))

    assert [] == [path for path in out.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    resume = ["--resume_from_checkpoint", str(out / "checkpoint-1")]
    settings.write_text("token: canary-renewed\nroom: one\n")
    train(command(material, tmp_path / "again", *plugin, *resume))
    settings.write_text(f"token: {CANARY}\nroom: two\n")
    with pytest.raises(ConfigError) as caught:
        train(command(material, tmp_path / "other", *plugin, *resume))
    assert "room" in str(caught.value) and CANARY not in str(caught.value)


def test_an_objects_token_is_not_recorded_either() -> None:
    class Sending(Plugin):
        settings_schema = {"properties": {"token": SECRET, "room": {"default": 1}}}

    assert ['Sending {"room": 1}'] == plugin_facts([Sending({"token": CANARY})])["plugins"]
    assert ['Sending {"room": 1}'] == plugin_facts([Sending()])["plugins"]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"s": SECRET}},
        {"properties": {"s": {"$ref": "#/$defs/x"}}, "$defs": {"x": SECRET}},
        {"properties": {"s": {"$ref": "#x"}}, "$defs": {"x": {"$anchor": "x", **SECRET}}},
        {"properties": {"s": {"$ref": "#/$defs/x", "writeOnly": True}}, "$defs": {"x": {"type": "string"}}},
        {"properties": {"s": {"anyOf": [{"type": "null"}, SECRET]}}},
        {"properties": {"s": {"type": "string"}}, "allOf": [{"properties": {"s": SECRET}}]},
        {"properties": {"s": {"type": "string"}}, "if": {"required": ["a"]}, "then": {"properties": {"s": SECRET}}},
        {"dependentSchemas": {"a": {"properties": {"s": SECRET}}}},
        {"patternProperties": {"^s": SECRET}},
        {"properties": {"a": {}}, "additionalProperties": SECRET},
        {"properties": {"a": {}}, "unevaluatedProperties": SECRET},
    ],
)
def test_a_secret_is_found_wherever_a_schema_says_so(schema: dict[str, Any]) -> None:
    """Also where it says so in another case than the one at hand."""
    assert [] == schema_problems(schema, "p.py:1")
    assert {"a": 1} == public({"a": 1, "s": CANARY}, schema)


def test_secrets_inside_of_sections_and_lists_are_left_out() -> None:
    schema = {
        "properties": {
            "hosts": {"items": {"$ref": "#/$defs/host"}},
            "keys": {"prefixItems": [{}, SECRET], "items": {}},
        },
        "$defs": {"host": {"properties": {"password": SECRET, "next": {"$ref": "#/$defs/host"}}}},
    }
    host = {"name": "a", "password": CANARY}

    assert {"hosts": [{"name": "a", "next": {"name": "a"}}], "keys": [1, None, 3]} == public(
        {"hosts": [{**host, "next": host}], "keys": [1, CANARY, 3]}, schema
    )
    assert {"free": {"a": [1]}} == public({"free": {"a": [1]}}, {})


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"minLength": 40}, "s.yaml:1:4: s: expected at least 40 characters, and is something else"),
        ({"type": "integer"}, "s.yaml:1:4: s: expected integer, got string"),
        ({"enum": ["x"]}, "s.yaml:1:4: s: does not fit its enum"),
        ({"anyOf": [{"type": "null"}, {"maxLength": 1}]}, "s.yaml:1:4: s: does not fit its anyOf"),
    ],
)
def test_an_error_shows_no_secret(part: dict[str, Any], told: str, write: Any) -> None:
    """Nor does one of the section around it, whose message would hold everything in it."""
    write("s.yaml", f"s: {CANARY}\n")
    document, _ = read_settings("s.yaml")
    assert document is not None
    around = {"properties": {"s": {"writeOnly": True}}, "not": {"required": ["s"]}}

    assert [told] == list(map(str, check(document, {"properties": {"s": {"writeOnly": True, **part}}})[1]))
    assert ["s.yaml:1:1: does not fit its not"] == list(map(str, check(document, around)[1]))
