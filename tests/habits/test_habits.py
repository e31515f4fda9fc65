"""Habits of the repository that a tool can check: one place for a key, no machine's paths, short files, equal pins."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
# In pieces, so that this file doesn't hold what it looks for.
PUBLIC_NAME = re.compile("--tt" + "_|TORCH_" + "TURBO_")
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|farm|opt/w|home/\w+)" + r"/\w")
UNFINISHED = re.compile("raise NotImplemented" + "Error|\\bTO" + "DO\\b|\\bFIX" + "ME\\b|\\bX" + "XX\\b")


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match, without links, which would show a file twice."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


PYTHON = tracked("*.py")
SOURCES = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("torchturbo", "codegen")]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONSTRAINTS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))


def lines_with(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    """Return every line that matches, as file:line: text."""
    found = []
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_flags_and_variables_are_written_only_in_the_schema():
    templates = [path for path in tracked("codegen/*") if path.suffix != ".py"]
    assert len(SOURCES) > 20
    assert lines_with(PUBLIC_NAME, SOURCES + templates) == []


def test_the_search_for_flags_would_find_one(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    planted = tmp_path / "planted.py"
    planted.write_text('FLAG = "--tt' + '_gbs"\nVARIABLE = "TORCH_' + 'TURBO_GBS"\nFINE = "--other"\n', "utf-8")
    assert len(lines_with(PUBLIC_NAME, [planted])) == 2


def test_no_file_names_a_path_of_one_machine():
    texts = [path for path in tracked() if path.suffix not in (".png", ".ico", ".gz")]
    assert lines_with(MACHINE_PATH, texts) == []


def test_nothing_is_left_unfinished():
    assert lines_with(UNFINISHED, SOURCES) == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_first_line_says_what_the_file_is_about(path):
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, "no docstring"
    first = docstring.splitlines()[0]
    assert first.endswith((".", ":", "…")) or first.endswith("``."), f"the first line is no sentence: {first!r}"


def test_files_and_functions_stay_short():
    long = [
        f"{path.relative_to(ROOT)}: {len(path.read_text('utf-8').splitlines())} lines"
        for path in SOURCES
        if len(path.read_text("utf-8").splitlines()) > LONGEST_FILE
    ]
    for path in SOURCES:
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > LONGEST_FUNCTION:
                long.append(f"{path.relative_to(ROOT)}:{function.lineno}: {function.name} has {length} lines")
    assert long == []


def test_test_files_have_names_of_their_own():
    names = Counter(path.name for path in tracked("tests/*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_hooks_use_the_pins_of_codegen():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    groups = PYPROJECT["dependency-groups"]
    by_id = {hook["id"]: set(hook["additional_dependencies"]) for hook in hooks}
    pinned = {re.split("[=>]", pin)[0] for pin in groups["codegen"]}
    runtime = [need for need in PYPROJECT["project"]["dependencies"] if re.split("[=>]", need)[0] not in pinned]
    assert by_id["codegen"] == {*groups["codegen"], *runtime}
    ruff = {pin for pin in groups["codegen"] if pin.startswith("ruff==")}
    assert by_id["ruff-check"] == by_id["ruff-format"] == set(groups["lint"]) == ruff


def test_constraints_fit_the_package_metadata():
    extra = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(PYPROJECT["project"]["optional-dependencies"]["train"])))
    assert {"torch", "transformers", "accelerate", "gguf"} <= extra.keys() & CONSTRAINTS.keys()
    for name in extra.keys() & CONSTRAINTS.keys():
        assert [int(part) for part in CONSTRAINTS[name].split(".")] >= [int(part) for part in extra[name].split(".")], (
            name
        )


def test_changelog_has_an_unreleased_section_first():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
