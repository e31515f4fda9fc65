"""``torchturbo config schema``: the JSON Schema that editors read, of a configuration or of a plugin's settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torchturbo.generated
from torchturbo.errors import fail

SCHEMA = Path(torchturbo.generated.__file__).parent / "torchturbo.schema.json"


def run(options: argparse.Namespace) -> int:
    """Print the schema, or where it is installed; that of a plugin is what its code says, so the code is run."""
    if options.plugin is not None:
        return _print_plugin(options.plugin)
    print(SCHEMA if options.path else SCHEMA.read_text(encoding="utf-8").rstrip())
    return 0


def _print_plugin(text: str) -> int:
    from torchturbo.plugins.load import settings_schema
    from torchturbo.plugins.schema import DRAFT

    schema, problems = settings_schema(text)
    if schema is None:
        fail(problems)
    print(json.dumps({"$schema": DRAFT, **schema}, indent=2, ensure_ascii=False))
    return 0
