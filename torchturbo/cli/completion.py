"""``torchturbo completion SHELL``: print the generated script."""

from __future__ import annotations

from pathlib import Path

import torchturbo.generated
from torchturbo.cli.parser import build_parser
from torchturbo.generated.keys import FLAG_PREFIX, KEYS


def run(words: list[str]) -> int:
    """Print the completion script of a shell."""
    options = build_parser(KEYS.values(), f"{FLAG_PREFIX}help").parse_args(["completion", *words])
    script = Path(torchturbo.generated.__file__).parent / "completion" / f"torchturbo.{options.shell}"
    print(script.read_text(encoding="utf-8"), end="")
    return 0
