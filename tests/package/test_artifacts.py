"""What the sdist and the wheel hold, and whether the wheel works where no checkout is near."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "torchturbo" / "__init__.py").read_text("utf-8"), re.MULTILINE)[
    0
]
NEVER_SHIPPED = re.compile(
    r"(^|/)(node_modules|__pycache__|\.[a-z_]*cache|\.hypothesis|\.nox|\.venv|build|dist)(/|$)|\.py[co]$"
)
SDIST_FOLDERS = {"torchturbo", "generated", "schema", "codegen", "tests", "docs", "examples", "benchmarks"}

pytest.importorskip("build", reason="the package group is not installed; nox -s package does it")


def build(out: Path, source: Path, *which: str) -> Path:
    """Build in `source` and return the folder that holds the result."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *which, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that was built from that sdist."""
    return build(tmp_path_factory.mktemp("dist"), ROOT)


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return built / f"torchturbo-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="session")
def sdist(built: Path) -> Path:
    return built / f"torchturbo-{VERSION}.tar.gz"


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a fresh environment outside the checkout and return its folder of commands."""
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    commands = home / "bin"
    subprocess.run([commands / "pip", "install", "--quiet", str(wheel)], check=True, cwd=home)
    return commands


def tracked(*folders: str) -> set[str]:
    """Return the files of these folders that git tracks or would; folders behind a link are not looked into."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def wheel_contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist())), "a name stands twice in the wheel"
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_names(path: Path) -> set[str]:
    """Return the files of the sdist without its first folder; a link counts if it leads to one of them."""
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive if not member.isdir()}
    links = {name: member.linkname for name, member in members.items() if member.issym() or member.islnk()}
    for name, target in links.items():
        assert posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) in members, f"{name} -> {target}"
    return set(members)


def run(command: list[str | Path], cwd: Path, code: int = 0) -> str:
    """Run a command far from the checkout, with nothing of ours in its environment; return its output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_wheel_is_the_package_and_nothing_else(wheel):
    folder = f"torchturbo-{VERSION}.dist-info"
    expected = tracked("torchturbo") | {f"torchturbo/{name}" for name in tracked("generated")}
    found = {name for name in wheel_contents(wheel) if not name.startswith(folder + "/")}
    assert found == expected
    assert {PurePosixPath(name).parts[0] for name in wheel_contents(wheel)} == {"torchturbo", folder}


def test_wheel_holds_the_editor_schema(wheel):
    shipped = wheel_contents(wheel)["torchturbo/generated/torchturbo.schema.json"]
    assert shipped == (ROOT / "generated" / "torchturbo.schema.json").read_bytes()


def test_sdist_holds_the_sources_and_no_leftovers(sdist):
    names = sdist_names(sdist)
    assert not sorted(name for name in names if NEVER_SHIPPED.search(name))
    assert {PurePosixPath(name).parts[0] for name in names if "/" in name} == SDIST_FOLDERS
    assert names >= tracked(*SDIST_FOLDERS)
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "noxfile.py", "PKG-INFO"}


def test_wheel_from_the_tree_is_the_wheel_from_the_sdist(wheel, tmp_path):
    direct = build(tmp_path, ROOT, "--wheel") / wheel.name
    assert wheel_contents(direct) == wheel_contents(wheel)


def test_metadata_asks_for_torch_only_as_an_extra(wheel):
    text = wheel_contents(wheel)[f"torchturbo-{VERSION}.dist-info/METADATA"].decode()
    required = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
    assert {"torch>=2.13; extra == 'train'", "transformers>=5.6; extra == 'train'"} <= set(required)
    assert {line for line in required if "extra ==" not in line} == {"pyyaml>=6.0.2"}
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text


def test_installed_command_tells_its_version(installed, tmp_path):
    assert VERSION in run([installed / "torchturbo", "--version"], tmp_path)
    assert VERSION in run([installed / "python", "-I", "-m", "torchturbo", "--version"], tmp_path)


def test_installed_command_validates_an_example_without_torch(installed, tmp_path):
    example = sorted((ROOT / "examples").glob("*.yaml"))[0]
    copy = tmp_path / example.name
    copy.write_bytes(example.read_bytes())
    run([installed / "torchturbo", "config", "validate", copy.name], tmp_path)
    copy.write_text("parallel_plan:\n  sp_size: four\n", "utf-8")
    said = run([installed / "torchturbo", "config", "validate", copy.name], tmp_path, code=1)
    assert said.startswith(f"{copy.name}:2:12:") and "parallel_plan.sp_size" in said


def test_installed_package_brings_no_other_top_level_package(installed, tmp_path):
    code = """
import importlib.resources as resources, importlib.util as util
import torchturbo.generated as generated
assert "site-packages" in generated.__file__, generated.__file__
assert (resources.files("torchturbo.generated") / "torchturbo.schema.json").is_file()
for name in ("generated", "codegen", "schema", "tests", "torch"):
    assert util.find_spec(name) is None, name
"""
    assert run([installed / "python", "-I", "-c", code], tmp_path) == ""
