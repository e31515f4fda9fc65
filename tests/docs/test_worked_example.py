"""CONTRIBUTING's worked example, followed literally in a copy of the repository: one key in the schema is everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
KEY, FLAG, VARIABLE = "matmul_precision", "--tt_matmul_precision", "TORCH_TURBO_MATMUL_PRECISION"
NOT_COPIED = shutil.ignore_patterns("__pycache__")


def block(title: str) -> str:
    """Return the code block of the guide that has this title."""
    found = re.search(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', GUIDE, re.DOTALL | re.MULTILINE)
    assert found, f"CONTRIBUTING.md has no block titled {title}"
    return found[1]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository in which the steps of the guide were followed."""
    home = tmp_path_factory.mktemp("repository") / "copy"
    home.mkdir()
    for folder in ("schema", "codegen", "generated", "torchturbo"):
        shutil.copytree(ROOT / folder, home / folder, symlinks=True, ignore=NOT_COPIED)
    shutil.copy(ROOT / "pyproject.toml", home)

    source = home / "schema" / "torchturbo.schema.json"
    schema = json.loads(source.read_text("utf-8"))
    assert KEY not in schema["properties"]
    items = list(schema["properties"].items())
    after = list(schema["properties"]).index("use_deterministic_algorithms") + 1
    items[after:after] = json.loads("{" + block("schema/torchturbo.schema.json") + "}").items()
    schema["properties"] = dict(items)
    source.write_text(json.dumps(schema, indent=2), "utf-8")

    step = "torchturbo/engine/steps/matmul.py"
    (home / step).write_text(block(step), "utf-8")
    pipeline = home / "torchturbo" / "engine" / "pipeline.py"
    (row,) = re.findall(r"^ +Step\(.*\n", block("torchturbo/engine/pipeline.py"), re.MULTILINE)
    text, changed = re.subn(
        r"^STEPS: .*\(\n", lambda head: head[0] + row, pipeline.read_text("utf-8"), flags=re.MULTILINE
    )
    assert changed == 1
    pipeline.write_text(text, "utf-8")

    python(home, "-m", "codegen")
    return home


def python(home: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    """Run Python in the copy, which shadows the installed package, and return its output."""
    environ = os.environ | variables | {"PYTHONPATH": str(home)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=home, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_copy_is_what_the_schema_says(copy):
    python(copy, "-m", "codegen", "--check")


def test_every_generated_surface_has_the_option(copy):
    generated = copy / "generated"
    editor = json.loads((generated / "torchturbo.schema.json").read_text("utf-8"))["properties"][KEY]
    assert editor["enum"] == ["highest", "high", "medium"]
    assert FLAG in editor["markdownDescription"] and VARIABLE in editor["markdownDescription"]
    assert f"### {KEY}" in (generated / "docs" / "reference.md").read_text("utf-8")
    assert VARIABLE in (generated / "docs" / "environment.md").read_text("utf-8")
    assert f"{FLAG} {{highest,high,medium}}" in (generated / "help.txt").read_text("utf-8")
    for script in (generated / "completion").iterdir():
        assert FLAG in script.read_text("utf-8"), script.name
    names = {item["cli_name"] for item in json.loads((generated / "surface.json").read_text("utf-8"))["inputs"]}
    assert FLAG in names


def test_every_layer_reads_the_option(copy):
    code = f"""
import os, sys
from torchturbo.engine.args import TorchTurboArgs, get_arg_specs, parse_torchturbo_args
from torchturbo.engine.config import build_from_args
assert TorchTurboArgs().{KEY} is None
assert "{KEY}" in [spec.name for spec in get_arg_specs()]
def built(*argv):
    config = build_from_args(parse_torchturbo_args(list(argv))[0])
    return config.{KEY}, config.origin("{KEY}").place
print(built(), built("--tt_config", "turbo.yaml"), built("{FLAG}", "medium"))
os.environ["{VARIABLE}"] = "high"
print(built("--tt_config", "turbo.yaml"))
"""
    (copy / "turbo.yaml").write_text(f"{KEY}: medium\n", "utf-8")
    said = python(copy, "-c", code)
    assert "('highest', " in said
    assert "('medium', 'turbo.yaml:1:19')" in said
    assert f"('medium', '{FLAG}')" in said
    assert f"('high', '{VARIABLE}')" in said


def test_the_validator_and_the_commands_know_the_option(copy):
    (copy / "bad.yaml").write_text(f"{KEY}: low\n", "utf-8")
    said = python(copy, "-m", "torchturbo", "config", "validate", "bad.yaml", code=1)
    assert said.startswith("bad.yaml:1:19:") and f"{KEY}: expected one of highest, high, medium" in said
    assert "Internal precision of matrix products" in python(copy, "-m", "torchturbo", "config", "explain", KEY)
    assert FLAG in python(copy, "-m", "torchturbo", "completion", "bash")


def test_the_consumer_claims_the_key(copy):
    code = f"from torchturbo.engine.pipeline import STEPS; print(*(step.function for step in STEPS if {KEY!r} in step.keys))"
    assert python(copy, "-c", code) == "torchturbo.engine.steps.matmul:apply\n"


def test_the_tests_of_the_guide_pass_with_the_option(copy):
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    shutil.copytree(ROOT / "benchmarks", copy / "benchmarks", dirs_exist_ok=True)
    touched = [
        "tests/config/test_contract.py",
        "tests/codegen/test_schema_errors.py::test_the_schema_itself_is_valid",
        "tests/config/test_start_up.py::test_the_benchmark_compares_every_option_and_fills_a_field_with_each",
    ]
    if find_spec("torch") is not None:
        touched.append("tests/engine/test_pipeline.py")
    python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *touched)


@pytest.mark.skipif(find_spec("torch") is None, reason="the consumer calls torch, which isn't installed here")
def test_the_consumer_does_what_the_key_says(copy):
    code = f"""
import torch
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.context import Context
from torchturbo.engine.pipeline import STEPS
config = build_from_args(parse_torchturbo_args(["{FLAG}", "medium"])[0])
STEPS[0].load()(torch.nn.Linear(2, 2), config, Context())
print(torch.get_float32_matmul_precision())
"""
    assert python(copy, "-c", code) == "medium\n"
