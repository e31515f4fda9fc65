"""``torchturbo doctor``: what is installed, what this machine can do, what each key would do here, what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from torchturbo.cli.parser import build_parser
from torchturbo.generated.keys import FLAG_PREFIX, KEYS


def run(words: Sequence[str]) -> int:
    """Print the report; return 0 where training could run, 1 where something is in its way."""
    options = build_parser(KEYS.values(), f"{FLAG_PREFIX}help").parse_args(["doctor", *words])
    from torchturbo.cli.doctor.report import as_json, as_text, examine

    report = examine()
    print(as_json(report) if options.format == "json" else as_text(report))
    return 0 if report.can_train else 1
