"""Plugins on the command line of ``torchturbo config``: the schema for the editor; nothing else runs their code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import ROOT, python

from torchturbo.cli.main import main
from torchturbo.plugins.schema import DRAFT

SCHEMA = "{'type': 'object', 'properties': {'a': {'type': 'integer', 'description': 'caf\\u00e9'}}}"


def config(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, list[str]]:
    try:
        status = main(["config", *words])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err.splitlines()


def test_the_schema_of_a_plugins_settings_is_printed(write: Any, capsys: Any) -> None:
    """As JSON that a file can hold, with the draft that editors look for; a CONFIG beside the plugin is not read."""
    write("a.py", f"@register('llama_factory')\nclass A(Plugin):\n    settings_schema = {SCHEMA}\n")

    for word in ("a.py", "a.py:no.yaml"):
        status, out, err = config(capsys, "schema", "--tt_plugin", word)
        assert (0, []) == (status, err)
        assert {
            "$schema": DRAFT,
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "caf\u00e9"}},
        } == json.loads(out)


def test_one_schema_of_several_classes_is_one(write: Any, capsys: Any) -> None:
    """The same plugin for two frameworks."""
    write(
        "a.py",
        "".join(
            f"@register('{name}')\nclass {name}(Plugin):\n    settings_schema = {SCHEMA}\n"
            for name in ("hf_trainer", "llama_factory")
        ),
    )

    assert 0 == config(capsys, "schema", "--tt_plugin=a.py")[0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("@register()\nclass A(Plugin):\n    pass\n", "a.py: A has no settings_schema: settings are handed on as they are"),
        ("x = 1\n", "a.py: registers no plugin; put @register() from torchturbo.plugins above its Plugin class"),
        ("1 / 0\n", "a.py:3: ZeroDivisionError: division by zero"),
        (
            "@register()\nclass A(Plugin):\n    settings_schema = {}\n@register()\nclass B(Plugin):\n    settings_schema = {'type': 'object'}\n",
            "a.py: A, B have settings of 2 different kinds; give each a file of its own",
        ),
        (
            "@register()\nclass A(Plugin):\n    settings_schema = {'type': object}\n",
            "a.py:3: settings_schema: is no JSON Schema: TypeError: Object of type type is not JSON serializable",
        ),
    ],
)  # fmt: skip
def test_a_plugin_without_a_schema_says_why(text: str, error: str, write: Any, capsys: Any) -> None:
    """Exit status 2; nothing on stdout that an editor would take for a schema."""
    write("a.py", text)

    assert (2, "", [f"error: {error}"]) == config(capsys, "schema", "--tt_plugin", "a.py")


VALIDATED = """\
@register()
class A(Plugin):
    settings_schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
"""


def test_settings_files_can_be_validated(write: Any, capsys: Any) -> None:
    """As configurations are: each file for itself, for people, programs and GitHub."""
    write("a.py", VALIDATED)
    write("good.yaml", "a: 1\n")
    write("bad.yaml", "a: 010\nb: 1\n")
    words = ["validate", "--tt_plugin", "a.py", "good.yaml", "bad.yaml"]

    status, out, _ = config(capsys, *words)
    assert (1, [
        "good.yaml: ok",
        "bad.yaml:1:4: error: a: 010: a number with leading zeros; write 10, or put a text in quotes",
        "bad.yaml:2:1: error: b: unknown key; the keys here are a",
        "bad.yaml: 2 errors",
    ]) == (status, out.splitlines())  # fmt: skip
    status, out, _ = config(capsys, *words, "--format", "json")
    assert (1, [("bad.yaml", 1, 4), ("bad.yaml", 2, 1)]) == (
        status,
        [(item["file"], item["line"], item["column"]) for item in json.loads(out)],
    )
    assert 0 == config(capsys, *words[:-1])[0]
    status, out, _ = config(capsys, "validate", "--tt_plugin", "a.py", "no.yaml")
    assert 1 == status and out.startswith("no.yaml: error: no such file")


def test_a_plugin_that_says_nothing_of_its_settings_validates_none(write: Any, capsys: Any) -> None:
    write("a.py", "@register()\nclass A(Plugin):\n    pass\n")

    status, out, (line,) = config(capsys, "validate", "--tt_plugin", "a.py", "a.py")
    assert (2, "", "error: a.py: A has no settings_schema: settings are handed on as they are") == (status, out, line)


def test_without_jsonschema_nothing_is_left_unchecked(write: Any, load: Any, capsys: Any, monkeypatch: Any) -> None:
    """A schema that can't be applied is no reason to train with settings nobody checked."""
    from torchturbo.plugins import activate

    write("a.py", VALIDATED)
    write("a.yaml", "a: 1\n")
    monkeypatch.setattr(activate, "find_spec", lambda name: None)
    expected = (
        "a.py:3: its settings_schema is checked by jsonschema, which is not installed; pip install 'torchturbo[train]'"
    )

    assert ([], [expected]) == load("a.py:a.yaml")
    assert (2, "", [f"error: {expected}"]) == config(capsys, "schema", "--tt_plugin", "a.py")


def test_no_such_plugin(folder: Any, capsys: Any) -> None:
    status, out, (line,) = config(capsys, "schema", "--tt_plugin", "no.py")

    assert (2, "") == (status, out)
    assert line.startswith("error: no.py: no such file")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--tt_plugins=a.py", "did you mean --tt_plugin?"),
        ("--tt_gbs=4", "see `torchturbo config validate --help`"),
        ("--frmat=json", "did you mean --format?"),
    ],
)
def test_an_option_of_the_command_is_found_by_what_sets_it_apart(word: str, remedy: str, capsys: Any) -> None:
    """Not by the letters that all of our options begin with."""
    status, _, (line,) = config(capsys, "validate", "a.yaml", word)

    assert (2, f"error: {word}: not an argument of `torchturbo config validate`; {remedy}") == (status, line)


def test_the_path_and_a_plugin_exclude_each_other(capsys: Any) -> None:
    status, _, (line,) = config(capsys, "schema", "--path", "--tt_plugin", "a.py")

    assert 2 == status and "not allowed with" in line


@pytest.mark.parametrize("words", [["show"], ["show", "--format", "json"], ["explain", "plugins"]])
def test_show_and_explain_run_no_plugin(words: list[str], write: Any, capsys: Any) -> None:
    """They say what is set; code runs where a training starts."""
    write("a.py", "raise SystemExit(9)\n")

    status, out, _ = config(capsys, *words, "--tt_plugin", "a.py:no.yaml")

    assert 0 == status
    assert "json" in words or "a.py:no.yaml" in out


def test_the_contract_and_the_loader_import_no_torch(folder: Any) -> None:
    """`config schema` starts as fast as the plugin itself lets it."""
    code = "import sys, torchturbo.plugins.load, torchturbo.cli.config.schema\n"
    code += "print([name for name in ('torch', 'transformers', 'jsonschema') if name in sys.modules])"

    assert "[]\n" == python("-c", code, root=ROOT).stdout
