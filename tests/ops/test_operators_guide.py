"""The guide's table of operators and devices is the registry's."""

from __future__ import annotations

import re
from pathlib import Path

from torchturbo.ops.registry import IMPLEMENTATIONS, NATIVE, OPS, of

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "operators.md"


def test_the_table_is_the_registry() -> None:
    """Operators in the order of the log's table, implementations best first, italics where auto holds back."""
    lines = GUIDE.read_text("utf-8").splitlines()
    start = lines.index("| operator | cpu | cuda | npu |")
    devices = [cell.strip() for cell in lines[start].split("|")[2:-1]]
    expected = []
    for op in OPS:
        cells = [
            ", ".join(
                f"*{row.name}*" if row.held_back else row.name
                for row in of(op)
                if device in row.devices and row.name != NATIVE
            )
            for device in devices
        ]
        expected.append(f"| `{op}` | {' | '.join(cells)} |")

    assert expected == lines[start + 2 : start + 2 + len(OPS)]


def test_the_guide_has_every_command() -> None:
    """As the errors of custom print them, without the hints in brackets."""
    text = re.sub(r"\s+", " ", GUIDE.read_text("utf-8"))
    commands = {re.sub(r" \(.*", "", row.command) for row in IMPLEMENTATIONS if row.command}

    assert [] == [command for command in sorted(commands) if command not in text]
