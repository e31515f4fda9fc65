"""Plugins of installed packages: found by their entry point's name, whatever is wrong with it told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchturbo.plugins import modules

MODULE = """\
from torchturbo.plugins import Plugin, register

@register()
class First(Plugin):
    name = "first"
    settings_schema = {"properties": {"a": {"type": "integer", "default": 1}}, "additionalProperties": False}

@register("llama_factory")
class Second(Plugin):
    name = "second"

class Unregistered(Plugin):
    name = "unregistered"
"""


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lay a distribution out as pip does: its package beside a dist-info folder, on the path."""
    site = folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def distribution(name: str, points: str, code: dict[str, str] | None = None) -> None:
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{modules.GROUP}]\n{points}\n")
        for file, text in (code or {}).items():
            path = site / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            monkeypatch.delitem(sys.modules, path.stem if path.parent == site else path.parent.name, raising=False)

    return distribution


@pytest.fixture(autouse=True)
def _forget_packages() -> Any:
    """A package of one test is not the package of the next one."""
    before = set(sys.modules)
    registered = list(modules.REGISTERED)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("pack"):
            del sys.modules[name]
    modules.REGISTERED[:] = registered


def test_a_name_loads_what_its_module_registers(install: Any, load: Any, write: Any) -> None:
    """For this framework and for any, with the settings behind the colon; again in the same process."""
    install("pack-a", "my-plugins = pack_a", {"pack_a.py": MODULE})
    write("s.yaml", "a: 4\n")

    for _ in range(2):
        plugins, problems = load("my-plugins:s.yaml")
        assert (["first"], [], {"a": 4}) == ([plugin.name for plugin in plugins], problems, plugins[0].settings)
    assert ["first", "second"] == [plugin.name for plugin in load("my-plugins", framework="llama_factory")[0]]


def test_a_name_can_mean_one_class(install: Any, load: Any) -> None:
    """With the framework that it registered for, or for any where it did not."""
    points = "one = pack_b.inner:First\ntwo = pack_b.inner:Second\nthree = pack_b.inner:Unregistered"
    install("pack-b", points, {"pack_b/__init__.py": "", "pack_b/inner.py": MODULE})

    plugins, problems = load("three", "one", "two")

    assert ["unregistered", "first"] == [plugin.name for plugin in plugins]
    assert ["two: is a plugin for llama_factory, and this run is under hf_trainer"] == problems


def test_a_package_registers_in_its_modules(install: Any, load: Any) -> None:
    install("pack-c", "pack = pack_c", {"pack_c/__init__.py": "from . import inner", "pack_c/inner.py": MODULE})

    assert ["first"] == [plugin.name for plugin in load("pack")[0]]


def test_files_and_packages_keep_the_order_of_the_line(install: Any, load: Any, write: Any) -> None:
    install("pack-d", "pack = pack_d", {"pack_d.py": MODULE})
    write("a.py", "@register()\nclass A(Plugin):\n    name = 'a'\n")

    assert ["first", "a"] == [plugin.name for plugin in load("pack", "a.py")[0]]
    assert ["a", "first"] == [plugin.name for plugin in load("a.py", "pack")[0]]


def test_nothing_of_a_package_is_imported_before_it_is_named(install: Any, load: Any) -> None:
    """Looking names up reads metadata alone."""
    install("pack-e", "pack = pack_e", {"pack_e.py": "raise SystemExit(3)"})

    assert {"pack"} <= modules.installed().keys()
    assert "pack_e" not in sys.modules
    (problem,) = load("pack")[1]
    assert problem.endswith("pack_e.py:1: the plugin ends the program instead of registering; remove the call of exit")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("emma", "--tt_plugin: no installed plugin is called emma; did you mean ema?"),
        ("quite-another", "--tt_plugin: no installed plugin is called quite-another; installed are away, ema, gone, plain"),
        ("away", "away: ModuleNotFoundError: No module named 'pack_away'; install pack_away into this environment"),
        ("gone", "gone: pack-f 1.2 offers pack_f:Frist, and pack_f has no Frist; did you mean First?"),
        ("plain", "site/pack_plain.py:2: thing is registered and no Plugin class; derive it from torchturbo.plugins.Plugin"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_used(given: str, problem: str, install: Any, load: Any) -> None:
    points = "ema = pack_f\naway = pack_away\ngone = pack_f:Frist\nplain = pack_plain:thing"
    install("pack-f", points, {"pack_f.py": MODULE, "pack_plain.py": "\ndef thing():\n    pass\n"})

    assert ([], [problem]) == load(given)


def test_a_file_of_that_name_is_thought_of(write: Any, load: Any) -> None:
    write("my_own.py", "")

    assert ["--tt_plugin: no installed plugin is called my_own; did you mean my_own.py?"] == load("my_own")[1]


def test_two_packages_that_offer_one_name_are_refused(install: Any, load: Any) -> None:
    """Which of them came first on the path is nobody's choice; one package found twice is one."""
    install("pack-g", "same = pack_g\nonce = pack_g", {"pack_g.py": MODULE})
    install("pack-h", "same = pack_h\nonce = pack_g", {"pack_h.py": MODULE})

    assert [
        "--tt_plugin: two plugins are called same: of pack-g 1.2 (pack_g) and pack-h 1.2 (pack_h); uninstall one, or"
        " give its file"
    ] == load("same")[1]
    assert [] == load("once")[1]


def test_the_same_name_twice_is_refused(install: Any, load: Any) -> None:
    install("pack-i", "pack = pack_i", {"pack_i.py": MODULE})

    assert ["--tt_plugin: pack:s.yaml is the same plugin as pack; give each once"] == [
        problem for problem in load("pack", "pack:s.yaml")[1] if "s.yaml: no such file" not in problem
    ]


def test_the_record_has_the_hash_of_the_packages_module(install: Any, load: Any) -> None:
    import hashlib

    install("pack-j", "pack = pack_j", {"pack_j.py": MODULE})

    (plugin,), _ = load("pack")
    assert hashlib.sha256(MODULE.encode()).hexdigest() == plugin.origin.sha256
