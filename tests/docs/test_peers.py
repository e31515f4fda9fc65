"""The comparison with other engines: whole rows, short cells, and a test that exists behind each claim of our own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "peers.md").read_text("utf-8")
COMPARISON, PROOFS = TEXT.split("## The tests")
CLAIM = re.compile(r"\[(?:yes|partly)\]\(#(t-[a-z0-9-]+)\)")
ROWS = {"Backend, precision, parallelism, memory": 12, "Losses and model features": 8}
ROWS["Observing, checkpoints, extension, devices, configuration"] = 13


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


def table(heading: str) -> list[list[str]]:
    """Return the rows of a section's table, its head first."""
    section = COMPARISON.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    head, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    return [head, *rows]


@pytest.mark.parametrize("heading", ROWS)
def test_every_row_is_whole(heading: str) -> None:
    """One word a cell: what it means stands below the table, wherever a peer does something in part."""
    head, *rows = table(heading)
    notes = re.findall(r"^\* \*\*(.+?)\*\*:", COMPARISON.partition(f"## {heading}\n")[2].partition("\n## ")[0], re.M)
    assert (ROWS[heading], 10, "TorchTurbo") == (len(rows), len(head), head[1])
    for feature, own, *peers in rows:
        assert CLAIM.fullmatch(own) or own == "no", feature
        assert len(peers) == 8 and set(peers) <= {"yes", "partly", "no", "itself"}, feature
        if "partly" in peers:
            assert feature in notes
    assert set(notes) <= {row[0] for row in rows}


def test_every_claim_leads_to_tests_that_exist() -> None:
    """By the anchor of its row in the last table, which has no other rows."""
    claimed = {CLAIM.fullmatch(row[1])[1]: row[0] for heading in ROWS for row in table(heading)[1:] if row[1] != "no"}  # type: ignore[index]
    proofs = dict(re.findall(r'^\| <a id="(t-[a-z0-9-]+)"></a>(.+?) \|', PROOFS, re.M))
    files = {
        name: re.findall(r"`(tests/[^`]+)`", line)
        for name in proofs
        for line in PROOFS.splitlines()
        if f'"{name}"' in line
    }
    assert claimed == proofs
    assert {} == {name: found for name, found in files.items() if not found}
    assert [] == [path for found in files.values() for path in found if not (ROOT / path).is_file()]


def test_versions_are_named_and_dated() -> None:
    """A peer without a version could mean any."""
    read = [cells(line) for line in COMPARISON.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert 8 == len(read)
    assert [] == [row for row in read if not re.search(r"\d+\.\d+", row[1])]
    assert re.search(r"\d+ \w+ 2026", COMPARISON)
