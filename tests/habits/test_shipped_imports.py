"""What is shipped uses no library that is made for tests."""

from __future__ import annotations

import ast
from pathlib import Path

import torchturbo

FOR_TESTS = {"unittest", "pytest", "hypothesis"}


def test_no_module_imports_a_library_for_tests() -> None:
    """A patch of one is no way to change a process in production."""
    found = []
    for path in sorted(Path(torchturbo.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in names if name.partition(".")[0] in FOR_TESTS]
    assert [] == found
