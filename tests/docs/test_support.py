"""The page of which model trains with what is what the checks of a launch say, for every family of every registry."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the page is made of models, and torch isn't installed here")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def code() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "tables" / "support.py"))


def test_the_committed_page_is_the_generated_one(code: dict[str, Any]) -> None:
    assert code["page"]().splitlines() == code["FILE"].read_text("utf-8").splitlines()


def test_every_family_of_the_registries_has_a_row(code: dict[str, Any]) -> None:
    found = set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", code["FILE"].read_text("utf-8"), re.M))
    registries = [
        ("torchturbo.parallel.experts", "FAMILIES"), ("torchturbo.objectives.mtp.families", "FAMILIES"),
        ("torchturbo.objectives.dspark.layouts", "LAYOUTS"), ("torchturbo.objectives.routers", "ROUTERS"),
    ]  # fmt: skip
    wanted = {row.model_type for module, name in registries for row in getattr(import_module(module), name)}
    wanted |= set(import_module("torchturbo.objectives.diffusion.models").MODELS)
    assert set() == wanted - found


def test_every_no_has_a_reason(code: dict[str, Any]) -> None:
    """In the second table, under the family's name."""
    table, reasons = code["FILE"].read_text("utf-8").split("## Why not")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    said = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in reasons.splitlines() if line.startswith("|")
    ]
    for row in rows:
        for title, cell in zip(head[2:], row[2:], strict=True):
            if cell != "yes":
                assert [] != [what for what, _, types in said if what.startswith(title) and row[1] in types.split(", ")]
