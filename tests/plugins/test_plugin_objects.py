"""Plugins that code makes, given as objects: their names, and what the record of a run says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plugin_runs import trainer

from torchturbo.errors import ConfigError
from torchturbo.observe.unused import UnusedParameters
from torchturbo.plugins import Plugin
from torchturbo.plugins.load import equal_names, plugin_facts


class Padding(Plugin):
    name = "padding"
    settings_schema = {"properties": {"limit": {"default": 0.5}}}


class Other(Plugin):
    name = "padding"


class Named(Plugin):
    """Called like one of the engine's observers."""

    name = "unused parameters"


def said(*plugins: Plugin) -> list[str]:
    return list(map(str, equal_names(plugins)))


def test_two_objects_of_one_name_are_refused(write: Any, load: Any) -> None:
    """Of one class or several, from a file or not, and with the engine's own observers."""
    rename = "give one of the classes another name"
    write("a.py", "@register()\nclass A(Plugin):\n    name = 'padding'\n")
    (loaded,), _ = load("a.py")

    assert [] == said(Padding(), Named(), Plugin())
    assert [
        f"turbo_plugins: an object of Other and an object of Padding are both called padding; {rename}",
        f"turbo_plugins: an object of Padding and an object of Padding are both called padding; {rename}",
    ] == said(Padding(), Other(), Padding())
    assert [f"--tt_plugin: an object of Padding and a.py are both called padding; {rename}"] == said(loaded, Padding())
    assert [
        f"turbo_plugins: the engine's own UnusedParameters and an object of Named are both called unused parameters;"
        f" {rename}"
    ] == said(Named(), UnusedParameters())


def test_one_object_twice_is_refused() -> None:
    """Each of its hooks would be called twice."""
    plugin = Padding()

    assert ["turbo_plugins: the same Padding object is given twice; give it once"] == said(plugin, plugin)


def test_the_record_knows_objects_by_name_and_settings() -> None:
    """As it knows those of a launch; without those that the engine made to watch."""

    class Bare(Plugin):
        def __init__(self) -> None:
            pass

    class Odd(Plugin):
        pass

    odd = Odd({"call": print, "path": {1, 2}})
    facts = plugin_facts([Padding(), Padding({"limit": 1}), Bare(), odd, UnusedParameters()])

    assert {
        "plugins": [
            'padding {"limit": 0.5}',
            'padding {"limit": 1}',
            "Bare",
            'Odd {"call": "builtin_function_or_method", "path": "set"}',
        ],
        "plugin_code": {},
    } == facts


def test_an_object_and_a_file_are_recorded_alike(write: Any, load: Any) -> None:
    """A run may go on with a plugin that is given the other way, with and without settings of its own."""
    schema = "{'properties': {'limit': {'default': 0.5}}}"
    write("a.py", f"@register()\nclass Padding(Plugin):\n    name = 'padding'\n    settings_schema = {schema}\n")
    write("s.yaml", "limit: 1\n")
    (bare,), _ = load("a.py")
    (given,), _ = load("a.py:s.yaml")

    for loaded, made in ((bare, Padding()), (given, Padding({"limit": 1}))):
        assert plugin_facts([made])["plugins"] == plugin_facts([loaded])["plugins"]


def test_a_trainer_holds_objects_to_it(tmp_path: Path) -> None:
    """Names when it is made, settings when it resumes; a run without the object does not go on either."""
    with pytest.raises(ConfigError, match="are both called padding"):
        trainer(tmp_path, [Padding(), Other()])
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, [Padding()], saving).train()

    checkpoint = str(tmp_path / "checkpoint-1")
    for plugins, found in (([Padding({"limit": 1})], r'padding \{"limit": 1\}'), ([], "none")):
        with pytest.raises(ConfigError, match=f"made with .padding .*0.5.*, this run has .*{found}"):
            trainer(tmp_path / "other", plugins, saving).train(checkpoint)
    trainer(tmp_path / "same", [Padding({"limit": 0.5})], saving).train(checkpoint)


def test_an_object_that_changes_its_settings_changes_no_record() -> None:
    plugin = Padding({"limit": [1]})
    plugin.settings["limit"].append(2)

    assert ['padding {"limit": [1]}'] == plugin_facts([plugin])["plugins"]
