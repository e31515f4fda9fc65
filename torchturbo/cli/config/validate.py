"""``torchturbo config validate FILE...``: check files for people, for programs, and for GitHub's annotations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from torchturbo.cli.terminal import GREEN, RED, YELLOW, paint
from torchturbo.config.file import read_file
from torchturbo.config.merge import merge
from torchturbo.errors import Problem, fail, printable


class Finding(NamedTuple):
    """One problem or warning of one file."""

    file: str
    line: int | None
    column: int | None
    key: str
    severity: str
    """``error`` or ``warning``."""
    message: str
    remedy: str


def run(options: argparse.Namespace) -> int:
    """Check each file on its own and return 1 if one has an error."""
    check = _check if options.plugin is None else _checker_of(options.plugin)
    findings = {file: check(file) for file in dict.fromkeys(options.files)}
    flat = [finding for found in findings.values() for finding in found]
    if options.format == "json":
        print(json.dumps([finding._asdict() for finding in flat], indent=2))
    elif options.format == "github":
        for finding in flat:
            print(_annotation(finding))
    else:
        for file, found in findings.items():
            _print(file, found)
    return 1 if any(finding.severity == "error" for finding in flat) else 0


def _check(file: str) -> list[Finding]:
    merged = merge([read_file(file)])
    findings = [
        *(_finding(file, problem, "error") for problem in merged.problems),
        *(_finding(file, warning, "warning") for warning in merged.warnings),
    ]
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _checker_of(plugin: str) -> Callable[[str], list[Finding]]:
    """Return the check of a plugin's settings file; a plugin that says nothing of its settings is refused."""
    from torchturbo.plugins.load import settings_problems, settings_schema

    schema, problems = settings_schema(plugin)
    if schema is None:
        fail(problems)
    return lambda file: [_finding(file, problem, "error") for problem in settings_problems(file, schema)]


def _finding(file: str, problem: Problem, severity: str) -> Finding:
    # A broken rule can stand at a default, which has no place.
    line, _, column = problem.place.removeprefix(f"{file}:").partition(":")
    known = line.isdigit() and column.isdigit()
    position = (int(line), int(column)) if known else (None, None)
    return Finding(file, position[0], position[1], problem.key, severity, problem.message, problem.remedy)


def _text(finding: Finding) -> str:
    return str(Problem("", finding.key, finding.message, finding.remedy))


def _print(file: str, found: list[Finding]) -> None:
    shown = printable(file)
    for finding in found:
        where = shown if finding.line is None else f"{shown}:{finding.line}:{finding.column}"
        word = paint(finding.severity, RED if finding.severity == "error" else YELLOW)
        print(f"{where}: {word}: {_text(finding)}")
    errors = sum(finding.severity == "error" for finding in found)
    if errors:
        print(f"{shown}: {errors} error{'s' if errors > 1 else ''}", file=sys.stdout)
    else:
        print(f"{shown}: {paint('ok', GREEN)}")


def _annotation(finding: Finding) -> str:
    """Return a workflow command (GitHub Actions, "Workflow commands": data and properties are percent-encoded)."""
    properties = {"file": finding.file, "line": finding.line, "col": finding.column}
    listed = ",".join(f"{name}={_encoded(str(value), True)}" for name, value in properties.items() if value is not None)
    return f"::{finding.severity} {listed}::{_encoded(_text(finding), False)}"


def _encoded(text: str, is_property: bool) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text
