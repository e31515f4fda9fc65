"""Every input that the fuzzer ever found wanting, and its hostile seeds, against the same oracles as when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cases
import fuzz
import oracles
import pytest
import seeds

CORPUS = sorted(path for path in seeds.CORPUS.iterdir() if path.is_file())
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_was_found_stays_mended(path: Path) -> None:
    """No exception, no hang, problems of one line each, files that load back, YAML and JSON alike."""
    oracles.check(path.read_bytes())


@pytest.mark.parametrize("text", [*seeds.hostile()], ids=lambda text: text[:12].encode("unicode_escape").decode())
def test_hostile_documents_cost_neither_time_nor_memory(text: str) -> None:
    """Alias bombs, deep nesting, long numbers, long lines, many keys."""
    oracles.check(cases.build(text))


def test_the_memory_of_all_hostile_documents_is_limited(tmp_path: Path) -> None:
    """All of them in one process that may grow by 500 MB."""
    for number, text in enumerate(seeds.hostile()):
        (tmp_path / f"{number}.txt").write_bytes(cases.build(text))
    script = (
        "import pathlib, sys, oracles; oracles.limit_memory();"
        "[oracles.check(path.read_bytes()) for path in sorted(pathlib.Path(sys.argv[1]).glob('*.txt'))]"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tmp_path, env=fuzz.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr[-2000:])


def test_a_case_is_what_was_built() -> None:
    """File, words and variables, also such as no UTF-8 gives."""
    words, variables = ("--tt_gbs", "4", "", "\udc80"), {"TORCH_TURBO_GBS": "a=b", "X": "\udcff"}
    assert (b"gbs: 1\n", words, variables) == cases.parse(cases.build("gbs: 1\n", words, variables))
    assert (b"", (), {}) == cases.parse(b"")
    assert (b"\xff\0", (), {}) == cases.parse(b"\xff\0")
    assert ("ab",) == cases.parse(b"\n%% words\na\0b").words


def test_the_limit_of_memory_holds(tmp_path: Path) -> None:
    """Else no oracle would notice what an input takes up."""
    done = subprocess.run(
        [sys.executable, "-c", "import oracles; oracles.limit_memory(); bytearray(600_000_000)"],
        cwd=tmp_path, env=fuzz.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "MemoryError" in done.stderr


def test_a_finding_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken oracle fails a replay with its reason; an input that is right fails none."""
    path = tmp_path / "input"
    path.write_bytes(b"gbs: 8\n")
    assert "it passes without the fuzzer" == fuzz.replayed(path)
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "oracles.py").write_text("def limit_memory(): pass\ndef check(data): raise ValueError(data)\n")
    monkeypatch.setattr(fuzz, "HERE", tmp_path)
    assert "ValueError: b'gbs: 8" in fuzz.replayed(path)


def test_every_word_of_the_dictionary_is_one_line() -> None:
    """libFuzzer reads ``"..."`` a line; a word it can't read ends it."""
    lines = seeds.dictionary().splitlines()
    assert len(lines) > 150
    assert all(line.isascii() and line.startswith('"') and line.endswith('"') and len(line) > 2 for line in lines)
