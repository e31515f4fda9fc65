"""Measure what reading options costs at start-up: TorchTurbo, bare argparse and the usual libraries, same options.

Every program runs in cold processes, code from ``.pyc``, in interleaved rounds. The figure is the CPU time of the
process, user and system, as a ratio taken inside a round; the table shows medians over the rounds. Timings belong to
a quiet machine and to people: nothing in CI runs this with ``--check``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from programs import HELP_FLAG, Option, argv, flat_file, in_files, modules, nested_file, options

from torchturbo.generated.keys import KEYS

ROOT = Path(__file__).parent.parent
FLAGS = 20
AGAIN = 100
"""Parses after the first one in a process."""
PEERS = {
    "tyro": "tyro",
    "jsonargparse": "jsonargparse",
    "pydantic_settings": "pydantic-settings",
    "transformers": "HfArgumentParser",
}
SMALL = ("mixed_precision", "gbs", "parallel_plan.sp_size", "activation_checkpointing.enabled")
OVERRIDES = {"gbs": 8, "parallel_plan.sp_size": 4, "mtp.enabled": True}
PASS = "pass"
COLUMNS = {
    "help": "help",
    "flags": f"{FLAGS} flags",
    "full": "full file + 3",
    "small": "small file + 3",
    "first": "first parse",
    "again": "next parses",
}
IN_PROCESS = ("first", "again")


class Target(NamedTuple):
    """A limit that TorchTurbo keeps."""

    text: str
    row: str
    base: str
    limit: float


TARGETS = (
    Target(f"{FLAGS} flags, cold, against bare argparse", "flags", "argparse flags", 1.25),
    Target("full file + 3 flags, cold, against python -c pass", "full", PASS, 7.0),
    Target("small file + 3 flags, cold, against python -c pass", "small", PASS, 7.0),
    Target("first parse in a process, against bare argparse", "first", "argparse first", 1.5),
    Target("next parses in a process, against bare argparse", "again", "argparse again", 1.5),
)


class Program(NamedTuple):
    """One command to measure."""

    code: str
    words: list[str]
    in_process: bool = False
    """Whether it prints what it measured itself instead of being measured as a whole."""


# The clock starts behind the imports. The first call is what a launch pays; later ones find all caches warm.
_IN_PROCESS = f"""\
import sys, time
from {{module}} import main
times = []
for _ in range({AGAIN + 1}):
    start = time.process_time_ns()
    main(sys.argv[1:])
    times.append(time.process_time_ns() - start)
print(times[0] / 1e9, sorted(times[1:])[{AGAIN // 2}] / 1e9)
"""


def main() -> int:
    """Measure, print, and with ``--check`` return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: 15")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of the table")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    parser.add_argument("--only", nargs="*", choices=tuple(PEERS), help="measure only these libraries")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds: expected at least 1")
    installed = [name for name in PEERS if _is_installed(name) and (given.only is None or name in given.only)]
    with tempfile.TemporaryDirectory() as folder:
        programs = write_programs(Path(folder), installed)
        environment = _environment(Path(folder))
        _warm_up(programs, environment)
        rounds = [_round(programs, environment, number) for number in range(given.rounds)]
    result = _result(rounds, installed)
    print(json.dumps(result, indent=2) if given.json else _table(result))
    return 1 if given.check and not all(target["kept"] for target in result["targets"]) else 0


# -- what is measured -------------------------------------------------------------------------------------------------


def write_programs(folder: Path, peers: Iterable[str]) -> dict[str, Program]:
    """Write every program into a folder and return the commands by name: ``tyro flags``, ``torchturbo full``, …"""
    table = options()
    files = _write_files(folder, table)
    flat_files = {name: files[f"{name}_flat"] for name in ("full", "small")}
    for name, text in modules(table, flat_files).items():
        (folder / f"bench_{name}.py").write_text(text, "utf-8")

    usual = [option for option in in_files(table) if option.value is not None][:FLAGS]
    overrides = [option for option in table if option.key.path in OVERRIDES]
    given, overriding = argv(usual), argv(overrides, OVERRIDES)
    gbs = next(option for option in usual if option.key.path == "gbs")
    programs = {PASS: Program("pass", [])}
    for name in ("argparse", "torchturbo", *peers):
        flags = _words(name, given)
        field = gbs.spec.args_name if name == "torchturbo" else gbs.field
        programs[f"{name} help"] = _cold(name, [HELP_FLAG if name == "torchturbo" else "--help"])
        programs[f"{name} flags"] = _cold(name, flags, f".{field} == {gbs.value}")
        programs[f"{name} in process"] = Program(_IN_PROCESS.format(module=f"bench_{name}"), flags, in_process=True)
        if name == "argparse":
            continue  # it reads no files
        for size in flat_files:
            words = [table[0].flag, str(files[size])] if name == "torchturbo" else []  # the others name it themselves
            expected = f".{field} == {OVERRIDES['gbs']}"
            programs[f"{name} {size}"] = _cold(f"{name}_{size}", words + _words(name, overriding), expected)
    for words in _commands(table[0].flag, str(files["full"])):
        programs[f"torchturbo {' '.join(words[:2])}"] = _cold("torchturbo_command", words)
    return programs


def _commands(flag: str, file: str) -> list[list[str]]:
    """Return the command lines of the ``torchturbo`` command that people wait for."""
    configured = [flag, file]
    return [
        ["--version"],
        ["config", "show", *configured],
        ["config", "explain", "gbs", *configured],
        ["config", "validate", file],
    ]


def _write_files(folder: Path, table: list[Option]) -> dict[str, Path]:
    keys = [key.path for key in KEYS.values() if not key.runtime]
    texts = {
        "full": nested_file(keys),
        "small": nested_file(SMALL),
        "full_flat": flat_file(in_files(table)),
        "small_flat": flat_file(option for option in table if option.key.path in SMALL),
    }
    files = {name: folder / f"{name}.yaml" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text, "utf-8")
    return files


def _words(name: str, words: list[str]) -> list[str]:
    # tyro insists on True with a capital; jsonargparse on a small letter.
    return words if name == "tyro" else [word.lower() if word in ("True", "False") else word for word in words]


def _cold(module: str, words: list[str], expected: str = "") -> Program:
    code = f"import sys, bench_{module}; options = bench_{module}.main(sys.argv[1:])"
    return Program(f"{code}; assert options{expected}" if expected else code, words)


# -- measuring --------------------------------------------------------------------------------------------------------


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment in which code comes from ``.pyc`` files of this run's own."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONSTARTUP", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    paths = {"PYTHONPYCACHEPREFIX": str(folder / "pyc"), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return {**kept, **paths, "PYTHONHASHSEED": "0", "COLUMNS": "100"}


def _warm_up(programs: dict[str, Program], environment: dict[str, str]) -> None:
    """Run everything once uncounted, which writes the ``.pyc`` files, and see that it works and has no complaint."""
    for name, program in programs.items():
        done = _run(program, environment)
        complaint = done.stderr.strip() if name.startswith("torchturbo") else ""
        if done.returncode or complaint:
            raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stderr}")


def _run(program: Program, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program.code, *program.words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")


def _round(programs: dict[str, Program], environment: dict[str, str], number: int) -> dict[str, float]:
    """Run every program once and return its CPU seconds; each round starts at another one."""
    names = list(programs)
    start = number * 7 % len(names)
    seconds: dict[str, float] = {}
    for name in names[start:] + names[:start]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = _run(programs[name], environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if programs[name].in_process:
            entry = name.partition(" ")[0]
            seconds |= zip((f"{entry} first", f"{entry} again"), map(float, done.stdout.split()), strict=True)
        else:
            seconds[name] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds


# -- reporting --------------------------------------------------------------------------------------------------------


def _result(rounds: list[dict[str, float]], peers: list[str]) -> dict[str, Any]:
    ratios = {name: statistics.median(seconds[name] / seconds[_base(name)] for seconds in rounds) for name in rounds[0]}
    targets = []
    for target in TARGETS:
        each = [seconds[f"torchturbo {target.row}"] / seconds[target.base] for seconds in rounds]
        measured = statistics.median(each)
        spread = [min(each), max(each)]
        targets.append({**target._asdict(), "measured": measured, "spread": spread, "kept": measured <= target.limit})
    return {
        "machine": _machine(),
        "versions": {name.replace("_", "-"): _version(name) for name in ("torchturbo", "pyyaml", *peers)},
        "missing": [PEERS[name] for name in PEERS if name not in peers],
        "rounds": len(rounds),
        "cpu_milliseconds": {name: statistics.median(seconds[name] for seconds in rounds) * 1000 for name in rounds[0]},
        "ratios": ratios,
        "targets": targets,
    }


def _base(name: str) -> str:
    """Return what a figure is compared with in the table."""
    kind = name.rpartition(" ")[2]
    return f"argparse {kind}" if kind in IN_PROCESS else PASS


def _table(result: dict[str, Any]) -> str:
    ratios, times = result["ratios"], result["cpu_milliseconds"]
    lines = [
        f"{result['machine']}; {', '.join(f'{name} {version}' for name, version in result['versions'].items())}",
        f"CPU time, median of {result['rounds']} rounds; cold: x python -c pass ({times[PASS]:.1f} ms);"
        f" parses in a process: x bare argparse ({times['argparse first']:.2f} ms, then {times['argparse again']:.2f})",
        "",
        "| | " + " | ".join(COLUMNS.values()) + " |",
        "| --- |" + " ---: |" * len(COLUMNS),
    ]
    names = {"argparse": "bare argparse", "torchturbo": "**torchturbo**", **PEERS}
    for name, title in names.items():
        cells = [f"{ratios[f'{name} {column}']:.2f}" if f"{name} {column}" in ratios else "–" for column in COLUMNS]
        if f"{name} flags" in ratios:
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "| command | x pass |", "| --- | ---: |"]
    shown = {f"{entry} {column}" for entry in names for column in COLUMNS}
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items() if name not in shown and name != PASS]
    lines += ["", "| target | measured | spread | limit | |", "| --- | ---: | ---: | ---: | --- |"]
    for target in result["targets"]:
        low, high = target["spread"]
        kept = "kept" if target["kept"] else "MISSED"
        figures = f"{target['measured']:.2f} | {low:.2f} to {high:.2f} | {target['limit']:.2f}"
        lines.append(f"| {target['text']} | {figures} | {kept} |")
    if result["missing"]:
        lines += ["", f"Not installed or left out: {', '.join(result['missing'])}."]
    return "\n".join(lines)


def _machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = [
            line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name")
        ]
        model = found[0].partition(":")[2].strip() if found else model
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} x {model}, {platform.python_implementation()} {platform.python_version()}"


def _is_installed(module: str) -> bool:
    try:
        _version(module)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _version(module: str) -> str:
    if module == "torchturbo":
        from torchturbo import __version__

        return __version__
    return importlib.metadata.version(module.replace("_", "-"))


if __name__ == "__main__":
    raise SystemExit(main())
