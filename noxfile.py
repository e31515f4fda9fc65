"""Development sessions: `nox -l` lists them, `nox` runs lint, typecheck and tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"  # a missing interpreter is looked for on this machine only
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
NODE_MODULES = ROOT / "tests" / "ide" / "node_modules"
# The environment of the README. Torch is a large download, so the sessions that need it share this one.
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# These folders need a language server, a browser, a build backend, LLaMA-Factory or Triton, and have sessions of their own.
OWN_SESSION = ["tests/ide", "tests/site", "tests/package", "tests/llama_factory/real", "tests/ops/interpreted"]
# What holds without torch, on every supported Python: schema, code generation, configuration and commands.
WITHOUT_TORCH = ["tests/codegen", "tests/config", "tests/cli", "tests/docs", "tests/fuzz", "tests/habits"]
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}  # idle OpenMP threads sleep; spinning ones slow a shared machine down fivefold


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups of pyproject.toml."""
    return list(nox.project.dependency_groups(PYPROJECT, *names))


def with_torch(session: nox.Session, *groups: str) -> str:
    """Return the Python of .venv, after torch, the project and the groups are installed there.

    Everything goes in by pip: torch first, at the version that constraints.txt pins.
    """
    if not VENV_PYTHON.exists():
        session.run(sys.executable, "-m", "virtualenv", "--python=3.11", str(VENV), external=True)
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    session.run(*pip, "torch", external=True)
    session.run(*pip, "--editable", ".[train]", *group(*groups), external=True)
    return str(VENV_PYTHON)


@nox.session
def codegen(session: nox.Session) -> None:
    """Write generated/ from the schema; with `-- --check`, show the drift instead and fail."""
    session.install(*group("codegen"), *PYPROJECT["project"]["dependencies"])
    session.run("python", "-m", "codegen", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Lint every Python file and check its format."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check torchturbo and codegen with mypy (strict) and pyright."""
    python = with_torch(session, "typecheck", "codegen")
    session.run(python, "-m", "mypy", external=True)
    session.run(python, "-m", "pyright", "--pythonpath", python, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run all tests, training included, on Python 3.11 in .venv."""
    python = with_torch(session, "test", "test-training", "codegen")
    elsewhere = [f"--ignore={folder}" for folder in OWN_SESSION]
    arguments = session.posargs or ["--numprocesses=2"]  # each worker may start two ranks of its own
    env = QUIET | {"OMP_NUM_THREADS": "1"}
    session.run(python, "-m", "pytest", *elsewhere, *arguments, env=env, external=True)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Run the whole grids of which `tests` has a part: every layout, fifty kills during a save."""
    python = with_torch(session, "test", "test-training", "codegen")
    elsewhere = [f"--ignore={folder}" for folder in OWN_SESSION]
    arguments = session.posargs or ["--numprocesses=2"]
    env = QUIET | {"OMP_NUM_THREADS": "1"}
    session.run(python, "-m", "pytest", "-m", "full", *elsewhere, *arguments, env=env, external=True)


@nox.session(python=["3.12", "3.13"])
def tests_without_torch(session: nox.Session) -> None:
    """Run the tests of schema, codegen, configuration and commands where torch isn't installed."""
    session.install(*group("test", "codegen"), "--editable", ".")
    folders = [folder for folder in WITHOUT_TORCH if (ROOT / folder).is_dir()]
    session.run("python", "-m", "pytest", *folders, *session.posargs)


@nox.session
def ide(session: nox.Session) -> None:
    """Ask the YAML language server what an editor shows for our configuration files."""
    session.install(*group("ide"))
    if not NODE_MODULES.is_dir() or os.environ.get("CI"):
        session.run("npm", "ci", "--no-audit", "--no-fund", "--prefix", str(NODE_MODULES.parent), external=True)
    session.run("python", "-m", "pytest", "tests/ide", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site strictly and try it in Chromium; `-- serve` serves it while you write."""
    session.install(*group("docs"))
    if "serve" in session.posargs:
        session.run("zensical", "serve")
        return
    session.run("zensical", "build", "--strict", "--clean")
    session.run("python", "-m", "pytest", "tests/site", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build sdist and wheel into dist/, check what they hold, and try the wheel outside the checkout."""
    session.install(*group("package"))
    session.run("python", "-m", "pytest", "tests/package", *session.posargs)


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """Fuzz files, variables and command lines for ten minutes; `-- --seconds 60` for one."""
    session.install(*group("fuzz"), "--editable", ".")
    session.run("python", "tests/fuzz/fuzz.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure start-up against bare argparse and the usual configuration libraries."""
    session.install("--constraint", "constraints.txt", *group("bench"), "--editable", ".")
    session.run("python", "benchmarks/config_startup.py", *session.posargs)


@nox.session(venv_backend="none")
def bench_device(session: nox.Session) -> None:
    """Measure the engine: `-- chunk_loss --check` runs one script, without arguments all of them."""
    python = with_torch(session, "test", "test-training")
    everything = [["chunk_loss"], ["ops"], ["observe"], ["engine"], ["objectives"]]
    scripts = [session.posargs] if session.posargs else everything
    for name, *arguments in scripts:
        session.run(python, f"benchmarks/{name}.py", *arguments, env=QUIET, external=True)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Train the README's example in .venv."""
    python = with_torch(session)
    session.run(python, "-m", "torchturbo", "quickstart", *session.posargs, env=QUIET, external=True)


@nox.session(python="3.11", venv_backend="virtualenv")
def liger(session: nox.Session) -> None:
    """Run Liger's kernels on a CPU, in Triton's interpreter; with Triton about, torch.compile would not be as it is."""
    session.install("--constraint", "constraints.txt", *group("liger"), "--editable", ".[train]")
    env = QUIET | {"OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", "tests/ops/interpreted", *session.posargs, env=env)


@nox.session(python="3.11", venv_backend="virtualenv")
def llamafactory(session: nox.Session) -> None:
    """Train by LLaMA-Factory itself with the engine underneath; it needs an older Transformers than ours."""
    (torch,) = [
        line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("torch==")
    ]
    needs = group("llamafactory")
    session.install(torch, *needs)  # in one command, or pip replaces torch by the newest
    # Wheels of another torch build than the installed one do not load; training on text needs neither.
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio")
    session.install("--no-deps", "--editable", ".")
    (pin,) = [need for need in needs if need.startswith("llamafactory==")]
    sdist = ROOT / "build" / "llamafactory" / f"{pin.replace('==', '-')}.tar.gz"
    if not sdist.is_file():  # which holds the demo data; the wheel has none
        download = ["--no-deps", "--no-binary", "llamafactory", "--dest", str(sdist.parent), pin]
        session.run("python", "-m", "pip", "download", "--quiet", *download)
    env = QUIET | {"OMP_NUM_THREADS": "1", "LLAMAFACTORY_SDIST": str(sdist)}
    session.run("python", "-m", "pytest", "tests/llama_factory/real", *session.posargs, env=env)
