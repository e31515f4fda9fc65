"""``torchturbo config schema``: the JSON Schema that editors read."""

from __future__ import annotations

import argparse
from pathlib import Path

import torchturbo.generated

SCHEMA = Path(torchturbo.generated.__file__).parent / "torchturbo.schema.json"


def run(options: argparse.Namespace) -> int:
    """Print the schema, or where it is installed."""
    print(SCHEMA if options.path else SCHEMA.read_text(encoding="utf-8").rstrip())
    return 0
