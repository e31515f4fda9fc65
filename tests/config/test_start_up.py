"""What a start loads, and that the start-up benchmark measures what it says; nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchturbo.engine.args import get_arg_specs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from config_startup import Program, write_programs  # noqa: E402
from programs import options  # noqa: E402

OURS = "torchturbo"
# What a parse needs beyond bare argparse. Each module costs a launch of 8 ranks its import 8 times: think before adding.
BEYOND_ARGPARSE = {"typing"}
BEYOND_ARGPARSE_WITH_A_FILE = {"typing", "bisect", "yaml"}
LOADED_BY_YAML = {"base64", "binascii", "cython_runtime", "datetime", "math", "struct"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    return write_programs(tmp_path_factory.mktemp("programs"), [])


@pytest.fixture
def loaded(programs: dict[str, Program]) -> Callable[[str], set[str]]:
    """Return the modules that a program of the benchmark loads."""
    folder = str(Path(next(word for word in programs["torchturbo full"].words if word.endswith(".yaml"))).parent)

    def run(name: str) -> set[str]:
        code = f"{programs[name].code}\nimport sys; print(*sys.modules, file=sys.stderr)"
        done = subprocess.run(
            [sys.executable, "-c", code, *programs[name].words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT)])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return set(done.stderr.split())

    return run


def foreign(modules: set[str]) -> set[str]:
    """Return the packages that are neither ours nor another's inner ones."""
    tops = {name.partition(".")[0] for name in modules}
    return {name for name in tops if name != OURS and not name.startswith(("_", "bench_"))}


def test_a_parse_loads_next_to_nothing_beyond_bare_argparse(loaded):
    ours, bare = loaded("torchturbo flags"), loaded("argparse flags")
    assert foreign(ours) - foreign(bare) <= BEYOND_ARGPARSE
    assert "argparse" in bare - ours


def test_a_parse_loads_no_module_of_ours_that_only_a_configuration_needs(loaded):
    ours = {name.removeprefix(f"{OURS}.") for name in loaded("torchturbo flags") if name.startswith(OURS)}
    assert ours == {
        *(OURS, "config", "engine", "generated"),
        *("config.checks", "config.commandline", "config.keys", "config.launch", "config.layers", "config.scalars"),
        *("config.specs", "config.values", "engine.args", "errors", "generated.args", "generated.keys"),
        *("generated.validator", "logging"),
    }


def test_a_file_adds_the_yaml_library_alone(loaded):
    ours, bare = foreign(loaded("torchturbo full")), foreign(loaded("argparse flags"))
    assert ours - bare <= BEYOND_ARGPARSE_WITH_A_FILE | LOADED_BY_YAML


def test_help_loads_no_more_than_a_parse(programs, loaded):
    help_words = programs["torchturbo help"].words
    parse = programs["torchturbo flags"]
    programs["help and on"] = Program(f"try:\n  {parse.code.rpartition(';')[0]}\nexcept SystemExit: pass", help_words)
    assert foreign(loaded("help and on")) <= foreign(loaded("torchturbo flags"))


def test_the_benchmark_compares_every_option_and_fills_a_field_with_each():
    assert len(options()) == len([spec for spec in get_arg_specs() if spec.cli_name]) >= 45
    assert len({option.field for option in options()}) == len(options())


def test_bare_argparse_reads_what_we_read(programs, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(programs["torchturbo full"].words[1]).parent))
    parsed: dict[str, Any] = {}
    for name in ("argparse", OURS):
        module = __import__(f"bench_{name}")
        parsed[name] = module.main(programs[f"{name} flags"].words)
    for option in options():
        if option.spec.args_name:
            ours = getattr(parsed[OURS], option.spec.args_name)
            assert getattr(parsed["argparse"], option.field) == getattr(ours, "name", ours), option.flag


def test_the_benchmark_runs_and_reports():
    command = [sys.executable, str(ROOT / "benchmarks" / "config_startup.py"), "--rounds", "1", "--only", "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rounds"] == 1
    assert {"pass", "argparse flags", "torchturbo full", "torchturbo first"} <= report["ratios"].keys()
    assert [target["limit"] for target in report["targets"]] == [1.25, 7.0, 7.0, 1.5, 1.5]
    assert "HfArgumentParser" in report["missing"]
