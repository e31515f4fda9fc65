"""What the tests of the generators share: the outputs are generated once a session, and copies of the checkout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, python

from codegen.outputs import outputs
from codegen.source import read_source


@pytest.fixture(scope="session")
def generated() -> dict[Path, str]:
    """Return what the schema says, by path."""
    return outputs(
        read_source(ROOT / "schema" / "torchturbo.schema.json", ROOT / "schema" / "torchturbo.meta.schema.json")
    )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Return a function that copies what codegen needs, edits the schema, and generates."""

    def make(edit: Callable[[dict[str, Any]], object]) -> Path:
        folder = tmp_path_factory.mktemp("checkout")
        for name in ("schema", "codegen", "generated", "torchturbo"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = folder / "schema" / "torchturbo.schema.json"
        schema = json.loads(path.read_text(encoding="utf-8"))
        edit(schema)
        path.write_text(json.dumps(schema, indent=2), encoding="utf-8")
        done = python("-m", "codegen", root=folder, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return make
