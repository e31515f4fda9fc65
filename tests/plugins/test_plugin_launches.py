"""Plugin files from launch to launch of one process: read anew where they changed, kept for the runs that use them."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest


def test_each_launch_reads_the_files_as_they_are_then(write: Any, load: Any) -> None:
    """A notebook that trains twice after an edit gets the edit, in the plugin and in its siblings."""
    write("helper.py", "VALUE = 1\n", bare=True)
    write("a.py", "from .helper import VALUE\n@register()\nclass A(Plugin):\n    value = VALUE\n")
    (first,), _ = load("a.py")
    write("helper.py", "VALUE = 2\n", bare=True)
    (second,), _ = load("a.py")

    assert (1, 2) == (first.value, second.value)


def test_a_run_that_goes_on_keeps_its_plugins_while_another_begins(write: Any, load: Any) -> None:
    """Objects are pickled by the module that made them: a second trainer with the same files takes the first none."""
    write("helper.py", "class State:\n    pass\n", bare=True)
    write("a.py", "from .helper import State\n@register()\nclass A(Plugin):\n    state = State()\n")
    write("other/b.py", "@register()\nclass B(Plugin):\n    pass\n")
    (first, _), _ = load("a.py", "other/b.py")
    write("other/b.py", "@register()\nclass Changed(Plugin):\n    pass\n")
    again, problems = load("a.py", "other/b.py")

    assert (["A", "Changed"], []) == ([type(plugin).__name__ for plugin in again], problems)
    assert type(first) is type(again[0]) and first is not again[0]
    assert isinstance(pickle.loads(pickle.dumps(first.state)), type(again[0].state))
    assert first.origin.sha256 == again[0].origin.sha256


def test_a_file_that_failed_begins_anew(write: Any, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it registered before it failed, or was interrupted, counts no more; the file itself is unchanged."""
    write(
        "a.py",
        "import os\n@register()\nclass A(Plugin):\n    pass\nif 'FAILS' in os.environ:\n    raise eval(os.environ['FAILS'])\n",
    )
    monkeypatch.setenv("FAILS", "ValueError")
    assert ["a.py:8: ValueError"] == load("a.py")[1]
    monkeypatch.setenv("FAILS", "KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("a.py")
    monkeypatch.delenv("FAILS")

    plugins, problems = load("a.py")

    assert (["A"], []) == ([type(plugin).__name__ for plugin in plugins], problems)


def test_a_sibling_that_is_imported_late_is_read_anew_too(write: Any, load: Any) -> None:
    """By the second launch, and at once: bytecode of the same second would be the old file's."""
    write(
        "a.py",
        "@register()\nclass A(Plugin):\n    def value(self):\n        from .late import VALUE\n        return VALUE\n",
    )
    write("late.py", "VALUE = 1\n", bare=True)
    (first,), _ = load("a.py")
    assert 1 == first.value()
    write("late.py", "VALUE = 2\n", bare=True)
    (second,), _ = load("a.py")

    assert 2 == second.value()


def test_a_sibling_that_came_a_moment_ago_is_found(write: Any, folder: Path, load: Any) -> None:
    """Python keeps a folder's list while the folder's time stays as it was."""
    write("a.py", "from . import sys_\n")
    write("sys_.py", "", bare=True)
    load("a.py")
    status = folder.stat()
    write("new.py", "", bare=True)
    write(
        "a.py",
        "from . import new\n" + "@register()\nclass A(Plugin):\n    pass\n",
    )
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert [] == load("a.py")[1]


def test_objects_of_a_plugin_can_be_pickled(write: Any, load: Any) -> None:
    """Data loader workers and checkpoints do that; the module's name is the same in every process."""
    write("a.py", "class State:\n    pass\n@register()\nclass A(Plugin):\n    state = State()\n")
    (plugin,), _ = load("a.py")
    name = type(plugin.state).__module__

    assert type(plugin.state) is type(pickle.loads(pickle.dumps(plugin.state)))
    load("a.py")
    assert name in sys.modules
