"""The report of ``torchturbo doctor``: the facts, and how they are printed for people and for programs."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import torchturbo
from torchturbo.cli.doctor.device import Device, current_device
from torchturbo.cli.doctor.environment import Finding, findings
from torchturbo.cli.doctor.keys import effects
from torchturbo.cli.doctor.packages import Package, packages
from torchturbo.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, paint, width
from torchturbo.errors import printable
from torchturbo.observe.size import size
from torchturbo.ops.registry import IMPLEMENTATIONS
from torchturbo.plugins.modules import GROUP

WIDTH = 80
NAMES = 24
"""Columns of the names; a longer name has its text on the next line."""
ONLY_FOR = {"liger-kernel": "cuda", "torch_npu": "npu"}
"""Packages that are missed on one kind of device alone."""


class Report(NamedTuple):
    """Everything that was found out."""

    packages: list[Package]
    device: Device | None
    """None where torch is missing or can't be used."""
    keys: dict[str, str]
    plugins: list[str]
    missing: dict[str, str]
    """Commands, and what each brings."""
    problems: list[Finding]

    @property
    def can_train(self) -> bool:
        """Return whether a run would start here."""
        return not any(problem.severity == "error" for problem in self.problems)


def examine() -> Report:
    """Look at this machine; torch is imported where it is installed, nothing else of that size."""
    found = packages()
    problems = list(_package_problems(found))
    device = None
    if next(item for item in found if item.name == "torch").version is not None:
        try:
            device = current_device()
        except Exception as error:  # a broken installation may raise anything
            message = f"can't be used: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            problems.append(Finding("error", "torch", message, "install it anew"))
    problems = sorted([*problems, *findings(device)], key=lambda problem: problem.severity)  # errors first
    plugins = [f"{point.name} ({point.value})" for point in entry_points(group=GROUP)]
    missing = _missing(found, device)
    return Report(found, device, effects(device), sorted(plugins), missing, problems)


def _package_problems(found: Iterable[Package]) -> Iterator[Finding]:
    for item in found:
        if item.version is None and item.needed:
            yield Finding("error", item.name, f"is not installed, and {item.use} needs it", item.command)
        elif item.too_old:
            severity = "error" if item.needed else "warning"
            yield Finding(severity, item.name, f"{item.version} is too old, {item.minimum} is needed", item.command)


def _missing(found: Iterable[Package], device: Device | None) -> dict[str, str]:
    """Return what could be installed for this device, by the command that does it."""
    kind = "" if device is None else device.type
    wanted: dict[str, list[str]] = {}
    for item in found:
        if not item.usable and ONLY_FOR.get(item.name, kind) == kind:
            wanted.setdefault(item.command, []).append(f"{item.name} ({item.use})")
    for operator in device.operators if device else ():
        refused = dict(operator.others)
        for row in IMPLEMENTATIONS:
            absent = row.op == operator.op and row.command and refused.get(row.name, row.held_back) != row.held_back
            if absent and row.command not in wanted:
                wanted[row.command] = [f"{row.name} operators ({refused[row.name]})"]
    return {command: ", ".join(names) for command, names in wanted.items()}


# ---- for programs ----


def as_json(report: Report) -> str:
    """Return the report as JSON."""
    device = report.device
    tree: dict[str, Any] = {
        "torchturbo": torchturbo.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "can_train": report.can_train,
        "packages": [item._asdict() | {"usable": item.usable} for item in report.packages],
        "device": None,
        "keys": report.keys,
        "plugins": report.plugins,
        "missing": [{"command": command, "brings": text} for command, text in report.missing.items()],
        "problems": [problem._asdict() for problem in report.problems],
    }
    if device is not None:
        operators = [item._asdict() | {"others": dict(item.others)} for item in device.operators]
        tree["device"] = device._asdict() | {"operators": operators}
    return json.dumps(tree, indent=2)


# ---- for people ----


def as_text(report: Report) -> str:
    """Return the report as text of at most 80 columns."""
    sections = [_verdict(report), _problems(report), _packages(report), _device(report), _operators(report)]
    sections += [_keys(report), _plugins(report), _missing_text(report)]
    return "\n\n".join(section for section in sections if section)


def _verdict(report: Report) -> str:
    errors = sum(problem.severity == "error" for problem in report.problems)
    text = "training can run here"
    if errors:
        text = f"training can't run here: {errors} problem{'s' if errors > 1 else ''}"
    return f"torchturbo {torchturbo.__version__}: {paint(text, BOLD, RED if errors else GREEN)}"


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    rows = []
    for problem in report.problems:
        style = RED if problem.severity == "error" else YELLOW
        body = _fill(printable(str(problem)), len("  warning: "))
        rows.append(f"  {paint(f'{problem.severity}:'.ljust(8), style)} {body}")
    return _section("problems", rows)


def _packages(report: Report) -> str:
    rows = [_entry("python", f"{platform.python_version()} ({platform.platform(aliased=True)})")]
    for item in report.packages:
        if item.version is None:
            rows.append(_entry(item.name, f"not installed: {item.use}", RED if item.needed else DIM))
        elif item.too_old:
            rows.append(_entry(item.name, f"{item.version}, too old: {item.minimum} is needed", RED))
        else:
            rows.append(_entry(item.name, item.version))
    return _section("packages", rows)


def _device(report: Report) -> str:
    device = report.device
    if device is None:
        return ""
    many = f"{device.number} x " if device.number > 1 else ""
    rows = [
        _entry("device", f"{device.type}: {many}{device.name}"),
        _entry("memory", "not known" if device.memory is None else size(device.memory)),
        _entry("bf16", {"fast": "in hardware", "emulated": "emulated, slow", "none": "no"}[device.bf16]),
        _entry("ranks talk over", device.backend),
    ]
    return _section("device", rows)


def _operators(report: Report) -> str:
    if report.device is None:
        return ""
    rows = [_entry(item.op, item.chosen) for item in report.device.operators]
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in report.device.operators:
        for other in item.others:
            reasons.setdefault(other, []).append(item.op)
    for (name, reason), ops in reasons.items():
        rows.append(_wrapped(f"not {name} for {', '.join(ops)}: {reason}", "  "))
    return _section("operators, as ops.policy auto would choose", rows)


def _keys(report: Report) -> str:
    rows = [_entry(path, text) for path, text in report.keys.items()]
    return _section("what each key would do here", rows)


def _plugins(report: Report) -> str:
    return _section("plugins of installed packages", [f"  {printable(name)}" for name in report.plugins])


def _missing_text(report: Report) -> str:
    return _section("could be installed", [_lines(command, text) for command, text in report.missing.items()])


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([paint(title, BOLD), *rows]) if rows else ""


def _entry(name: str, text: str, *styles: str) -> str:
    """Return a name and its text, side by side where the name is short."""
    body = _fill(printable(text), NAMES)
    if len(name) > NAMES - 4:
        return f"  {name}\n{' ' * NAMES}{paint(body, *styles)}"
    return f"  {name}".ljust(NAMES) + paint(body, *styles)


def _lines(command: str, text: str) -> str:
    return f"  {command}\n{_wrapped(text, '      ')}"


def _fill(text: str, indent: int) -> str:
    return _wrapped(text, " " * indent).lstrip()


def _wrapped(text: str, indent: str) -> str:
    columns = min(width(), WIDTH)
    return textwrap.fill(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
