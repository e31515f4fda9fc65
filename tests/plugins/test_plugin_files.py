"""Plugins from files: which file is meant, order and isolation, and whatever can be wrong with a file or its code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from torchturbo.plugins.load import Given, plugin_facts, split

SIMPLE = """\
    @register()
    class {name}(Plugin):
        pass
"""


def one(name: str = "Some") -> str:
    return SIMPLE.format(name=name)


# ---- what a word names ----


@pytest.mark.parametrize(
    ("text", "target", "config"),
    [
        ("a.py", "a.py", None),
        ("dir/a.py:b.yaml", "dir/a.py", "b.yaml"),
        (r"C:\dir\a.py", r"C:\dir\a.py", None),
        (r"C:\dir\a.py:D:\b.yaml", r"C:\dir\a.py", r"D:\b.yaml"),
        ("x.py:y.py:z.json", "x.py:y.py", "z.json"),
        ("a:b/c.py:d:e.yaml", "a:b/c.py", "d:e.yaml"),
        ("a.py:b.py", "a.py", "b.py"),
        ("ema", "ema", None),
        ("my-plugin_2:conf.yaml", "my-plugin_2", "conf.yaml"),
        (r"ema:C:\conf.yaml", "ema", r"C:\conf.yaml"),
    ],
)
def test_a_word_is_split_where_the_settings_begin(text: str, target: str, config: str | None) -> None:
    """At the last colon that follows .py, so that a drive stays whole; behind a name at the first."""
    assert Given(text, target, config) == split(text)


# ---- order, isolation, identity ----


def test_plugins_come_in_the_order_given_and_within_a_file_in_its_own(write: Any, load: Any) -> None:
    write("b.py", one("B1") + one("B2"))
    write("a.py", one("A"))

    plugins, problems = load("b.py", "a.py")

    assert (["B1", "B2", "A"], []) == ([type(plugin).__name__ for plugin in plugins], problems)


def test_two_files_of_one_name_do_not_meet(write: Any, load: Any) -> None:
    """Nor do they meet a module of that name, and nothing is left on the search path."""
    write("one/plugin.py", "MARK = 'one'\n" + one("One").replace("    ", "", 1).replace("\n    ", "\n"))
    write("two/plugin.py", "MARK = 'two'\n" + one("Two").replace("    ", "", 1).replace("\n    ", "\n"))
    path = list(sys.path)

    plugins, problems = load("one/plugin.py", "two/plugin.py")

    assert [] == problems
    assert ["one", "two"] == [sys.modules[type(plugin).__module__].MARK for plugin in plugins]
    assert path == sys.path
    assert "plugin" not in sys.modules


def test_siblings_are_imported_relatively(write: Any, load: Any) -> None:
    """The folder is a package of its own; a helper that two plugins share is imported once."""
    write("helper.py", "COUNT = []\n", bare=True)
    for name in ("a", "b"):
        write(
            f"{name}.py",
            f"from .helper import COUNT\nCOUNT.append('{name}')\n@register()\nclass {name.upper()}(Plugin):\n    count = COUNT\n",
        )

    (first, second), problems = load("a.py", "b.py")

    assert [] == problems
    assert ["a", "b"] == first.count and first.count is second.count


def test_a_sibling_that_is_a_plugin_itself_runs_once_and_counts_once(write: Any, load: Any) -> None:
    """What a file imports is the sibling's own: it is active only where it is given too."""
    write("base.py", "@register()\nclass Base(Plugin):\n    pass\n")
    write("more.py", "from .base import Base\n@register()\nclass More(Base):\n    pass\n")

    alone, _ = load("more.py")
    both, problems = load("more.py", "base.py")

    assert ["More"] == [type(plugin).__name__ for plugin in alone]
    assert (["More", "Base"], []) == ([type(plugin).__name__ for plugin in both], problems)
    assert isinstance(both[0], type(both[1]))


def test_an_absolute_import_of_a_sibling_says_how_to_write_it(write: Any, load: Any) -> None:
    write("helper_of_mine.py", "", bare=True)
    write("a.py", "import helper_of_mine\n")
    write("b.py", "import no_such_package_at_all\n")

    assert [
        "a.py:3: ModuleNotFoundError: No module named 'helper_of_mine'; write `from . import helper_of_mine`: files"
        " beside a plugin are its siblings",
        "b.py:3: ModuleNotFoundError: No module named 'no_such_package_at_all'; install no_such_package_at_all into this"
        " environment",
    ] == load("a.py", "b.py")[1]


def test_a_file_that_failed_is_no_sibling_of_the_next(write: Any, load: Any) -> None:
    """It would be half a module: whoever imports it meets the same error."""
    write("bad.py", "x = 1\n1 / 0\n")
    write("b.py", "from .bad import x\n")

    assert ["bad.py:4: ZeroDivisionError: division by zero"] * 2 == load("bad.py", "b.py")[1]


def test_a_plugin_that_changes_its_settings_changes_no_record(write: Any, load: Any) -> None:
    """Nor those of the other classes of its file."""
    write(
        "a.py",
        "class Taking(Plugin):\n    def __init__(self, settings):\n        self.taken = settings.pop('x')\n@register()\nclass A(Taking):\n    pass\n@register()\nclass B(Taking):\n    pass\n",
    )
    write("s.yaml", "x: 1\n")

    plugins, problems = load("a.py:s.yaml")

    assert ([], [1, 1]) == (problems, [plugin.taken for plugin in plugins])
    assert ['A {"x": 1}', 'B {"x": 1}'] == plugin_facts(plugins)["plugins"]


def test_the_same_plugin_twice_is_refused(write: Any, load: Any) -> None:
    """By whatever path; its metrics and checkpoint files would overwrite each other."""
    write("a.py", one())
    write("s.yaml", "x: 1\n")
    Path("link.py").symlink_to("a.py")

    assert [
        "--tt_plugin: ./a.py:s.yaml is the same plugin as a.py; give each once",
        "--tt_plugin: link.py is the same plugin as a.py; give each once",
    ] == load("a.py", "./a.py:s.yaml", "link.py")[1]


def test_two_plugins_of_one_name_are_refused(write: Any, load: Any) -> None:
    """A loss term, a message and the record go by it."""
    write("a.py", "@register()\nclass A(Plugin):\n    name = 'term'\n")
    write("b.py", "@register()\nclass B(Plugin):\n    name = 'term'\n")

    assert ["--tt_plugin: b.py and a.py are both called term; give one of the classes another name"] == load(
        "a.py", "b.py"
    )[1]


def test_only_the_classes_of_the_framework_are_made(write: Any, load: Any) -> None:
    text = "@register()\nclass Any_(Plugin):\n    pass\n"
    text += "@register('hf_trainer')\nclass Hf(Plugin):\n    pass\n"
    text += "@register(framework='llama_factory')\nclass Lf(Plugin):\n    def __init__(self, settings):\n        raise OSError\n"
    write("a.py", text)

    plugins, problems = load("a.py")

    assert (["Any_", "Hf"], []) == ([type(plugin).__name__ for plugin in plugins], problems)


def test_the_record_knows_a_plugin_by_name_settings_and_code(write: Any, load: Any) -> None:
    import hashlib

    path = write(
        "a.py",
        "@register()\nclass A(Plugin):\n    name = 'first'\n    settings_schema = {'properties': {'y': {'default': 2}}}\n",
    )
    write("b.py", one("B"))
    write("s.yaml", "x: [1]\n")

    plugins, _ = load("a.py:s.yaml", "b.py")
    facts = plugin_facts(plugins)

    assert ['first {"x": [1], "y": 2}', "B"] == facts["plugins"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == facts["plugin_code"]["first"]
    assert "a.py:s.yaml" == plugins[0].origin.given


# ---- settings ----


def test_settings_are_one_mapping_completed_by_the_schema(write: Any, load: Any) -> None:
    """None without a file; each class has a copy of its own."""
    text = (
        "@register()\nclass {0}(Plugin):\n    {1}\n    def __init__(self, settings):\n        self.given = settings\n"
    )
    schema = "settings_schema = {'properties': {'a': {'default': 1}}}"
    write("a.py", text.format("A", schema) + text.format("B", "other = 1"))
    write("s.json", '{"b": [2]}')

    (first, second), problems = load("a.py:s.json")
    (bare, _), _ = load("a.py")

    assert ([], {"b": [2], "a": 1}, {"b": [2]}, None) == (problems, first.given, second.given, bare.given)
    assert first.given["b"] is not second.given["b"]


def test_a_schema_with_required_keys_needs_a_file(write: Any, load: Any) -> None:
    schema = "{'required': ['x', 'y'], 'properties': {'y': {'default': 1}}}"
    write("a.py", f"@register()\nclass A(Plugin):\n    settings_schema = {schema}\n")

    assert ["a.py:3: A needs settings: x; name its YAML or JSON file behind it, with a colon"] == load("a.py")[1]


def test_everything_wrong_with_everything_is_told_at_once(write: Any, load: Any) -> None:
    """Files, code, settings and schemas of all plugins; one broken one hides none of the others."""
    schema = "{'properties': {'n': {'type': 'integer'}}, 'additionalProperties': False}"
    write(
        "a.py",
        f"@register()\nclass A(Plugin):\n    settings_schema = {schema}\n    def step_end(self):\n        pass\n",
    )
    write("a.yaml", "n: 010\nm: 1\nn: 2\n")
    write("b.py", "1 / 0\n")
    write("d.py", "@register()\nclass D(Plugin):\n    settings_schema = {'type': 'nothing'}\n")

    assert [
        "a.yaml:1:4: n: 010: a number with leading zeros; write 10, or put a text in quotes",
        "a.yaml:3:1: n: key given twice (first at a.yaml:1:1); keep one of the two",
        "a.py:6: A: expected step_end(self, run), got step_end(self)",
        "a.yaml:2:1: m: unknown key; the keys here are n",
        "b.py:3: ZeroDivisionError: division by zero",
        "c.py: no such file; the path is taken from " + os.getcwd(),
        "d.py:3: settings_schema.type: is no JSON Schema: 'nothing' is not valid under any of the given schemas",
        "e.yaml: no such file; the path is taken from " + os.getcwd(),
    ] == sorted(load("a.py:a.yaml", "b.py", "c.py", "d.py:e.yaml")[1], key=lambda line: [*"abcde"].index(line[0]))


# ---- code that cannot be used ----


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n", "a.py: registers no plugin; put @register() from torchturbo.plugins above its Plugin class"),
        ("@register('llama_factory')\nclass A(Plugin):\n    pass\n", "a.py: is a plugin for llama_factory, and this run is under hf_trainer"),
        ("@register('hf-trainer')\nclass A(Plugin):\n    pass\n", "a.py:3: ValueError: 'hf-trainer' is no framework; expected one of hf_trainer, llama_factory"),
        ("@register\nclass A(Plugin):\n    pass\n", "a.py:3: TypeError: register is called with the class itself; write @register()"),
        ("@register()\nclass A:\n    pass\n", "a.py:3: A is registered and no Plugin class; derive it from torchturbo.plugins.Plugin"),
        ("@register()\ndef a():\n    pass\n", "a.py:3: a is registered and no Plugin class; derive it from torchturbo.plugins.Plugin"),
        ("def f():\n    raise RuntimeError('one\\ntwo')\nf()\n", "a.py:4: RuntimeError: one two"),
        ("raise RuntimeError\n", "a.py:3: RuntimeError"),
        ("import sys\nsys.exit('bye')\n", "a.py:4: the plugin ends the program instead of registering; remove the call of exit"),
        ("import json\njson.loads('{')\n", "a.py:4: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("class Odd(BaseException):\n    pass\nraise Odd('x')\n", "a.py:5: Odd: x"),
        ("@register()\nclass A(Plugin):\n    def __init__(self, settings):\n        super().__init__()\n        {}['x']\n", "a.py:7: A.__init__: KeyError: 'x'"),
        ("@register()\nclass A(Plugin):\n    def __init__(self):\n        pass\n", "a.py:3: A.__init__: TypeError: A.__init__() takes 1 positional argument but 2 were given"),
        ("@register()\nclass A(Plugin):\n    def __init__(self, settings):\n        exit(3)\n", "a.py:6: A.__init__: the plugin ends the program instead of registering; remove the call of exit"),
        ("@register()\nclass A(Plugin):\n    step_end = 3\n", "a.py:3: A: expected step_end(self, run), got step_end = 3"),
        ("@register()\nclass A(Plugin):\n    def loss_weight(self, batch):\n        pass\n", "a.py:5: A: expected loss_weight(self, batch, run), got loss_weight(self, batch)"),
        ("@register()\nclass A(Plugin):\n    def end(self, run, more):\n        pass\n", "a.py:5: A: expected end(self, run), got end(self, run, more)"),
        ("x = (\n", "a.py:3:5: is no Python: '(' was never closed"),
        ("from . import broken\n", "broken.py:1:5: SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("from .raising import f\nf()\n", "raising.py:2: OverflowError: too much"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_used_is_told_with_its_line(text: str, problem: str, write: Any, load: Any) -> None:
    """The line is the plugin's own, not that of the library in which it failed."""
    write("broken.py", "x = (\n", bare=True)
    write("raising.py", "def f():\n    raise OverflowError('too much')\n", bare=True)
    write("a.py", text)

    assert ([], [problem]) == load("a.py")


def test_a_hook_may_take_its_arguments_in_any_way(write: Any, load: Any) -> None:
    """Static, with defaults, with stars: what can be called is called."""
    text = """\
        @register()
        class A(Plugin):
            @staticmethod
            def step_end(run):
                pass
            def loss_term(self, *args):
                pass
            @classmethod
            def end(cls, run, more=1):
                pass
            def log(self, metrics, run, **more):
                pass
    """
    write("a.py", "import textwrap\n" + "\n".join(line[8:] for line in text.splitlines()))

    assert [] == load("a.py")[1]


def test_a_misspelt_hook_is_warned_of(write: Any, load: Any, logged: list[str]) -> None:
    """It would never be called; a method of the plugin's own is none of our business."""
    write(
        "a.py",
        "@register()\nclass A(Plugin):\n    def step_ends(self, run):\n        pass\n    def helper(self):\n        pass\n",
    )

    plugins, problems = load("a.py")

    assert (1, []) == (len(plugins), problems)
    assert ["a.py:5: A.step_ends is no hook and never called; did you mean step_end?"] == logged


def test_ctrl_c_in_a_plugins_import_ends_the_program(write: Any, load: Any) -> None:
    write("a.py", "raise KeyboardInterrupt\n")

    with pytest.raises(KeyboardInterrupt):
        load("a.py")


def test_a_python_file_as_settings_says_what_was_meant(write: Any, load: Any) -> None:
    write("a.py", one("A"))
    write("b.py", one("B"))

    assert [
        "b.py: expected a YAML or JSON file of settings, got a Python file; give --tt_plugin once for each plugin"
    ] == load("a.py:b.py")[1]
