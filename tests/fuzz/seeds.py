"""What the fuzzer starts from, and the words it mixes in.

It starts from the examples, every text that the tests of files feed in, hostile documents, and each option and variable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cases

from torchturbo.generated.keys import KEYS, SECTIONS

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
VALUES = (
    "true", "false", "null", "~", "0", "1", "-1", "1.0", "0.5", "1e-5", "1e999", "-inf", ".nan", "0x10", "0o7", "010",
    "1_000", "9" * 400, "None", "on", "yes", "TRUE", "'4'", '"4"', "bf16", "all", "auto", "DEBUG", "\u0663", "\u2028",
    "\ufeff", "\\ud800", "\\u0000", "\\x1b[31m", "%s", "{}", "[]", "{", "[",
)  # fmt: skip
SYNTAX = (
    "<<", "&a ", "*a", "!!str ", "!!binary ", "!t ", "---\n", "...\n", "%YAML 1.2\n", "? ", ": ", "- ", "|\n", ">-\n",
    "# ", "\r\n", "\t", "\\N", "\n%% words\n", "\n%% variables\n", "--", "=",
)  # fmt: skip


def texts() -> Iterator[bytes]:
    """Yield every seed."""
    for folder in (CORPUS, ROOT / "examples"):
        yield from (path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())
    for name in ("test_document.py", "test_files.py"):
        tree = ast.parse((ROOT / "tests" / "config" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                yield node.value if isinstance(node.value, bytes) else node.value.encode("utf-8", "surrogatepass")
    yield from map(cases.build, hostile())
    for key in KEYS.values():
        example = str(key.examples[0]).lower() if key.examples else "true"
        if key.cli:
            yield cases.build(words=(key.cli, example))
        if key.env:
            yield cases.build(variables={key.env: example})
    yield cases.build(
        "gbs: 8\n", ("--tt_config", "t.yaml", "--lr", "1e-5", "--tt_sp_size", "2"), {"TORCH_TURBO_GBS": "4"}
    )


def hostile() -> Iterator[str]:
    """Yield documents that cost a careless reader its time or its memory."""
    yield "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    yield "a: &a {b: *a}\n"
    yield "<<: &a {<<: *a}\n"
    yield "&a [" + "*a," * 50 + "]"
    for opening, closing in (("[", "]"), ("{a: ", "}"), ('{"a":', "}"), ("- ", ""), ("? ", "")):
        yield opening * 2_000
        yield opening * 2_000 + closing * 2_000
    yield "".join(f"{' ' * i}a:\n" for i in range(500))
    yield "gbs: " + "9" * 50_000
    yield "gbs: 1e" + "9" * 5_000
    yield "a" * 60_000
    yield "gbs: '" + "x" * 60_000
    yield "".join(f"k{i}: {i}\n" for i in range(5_000))
    yield "gbs: 1\n" * 3_000
    yield "mtp: {" + "enabled: true, " * 3_000 + "}"
    yield "!<" + "x" * 30_000 + "> a"
    yield "%TAG ! " + "y" * 30_000 + "\n--- a"
    yield "a: *" + "b" * 30_000
    yield "# " + "c" * 60_000
    yield "\n" * 60_000 + "x: 1"
    yield "gbs: !!int " + "1_" * 10_000
    yield "|" + "9" * 5_000


def dictionary() -> str:
    """Return the words that the fuzzer mixes in, in libFuzzer's form."""
    words = [*VALUES, *SYNTAX, *(path.rpartition(".")[2] for path in SECTIONS if path)]
    for key in KEYS.values():
        names = (key.path.rpartition(".")[2], key.cli, key.env, *key.choices)
        words += [name for name in names if name]
    return "".join(f'"{_escaped(word)}"\n' for word in dict.fromkeys(words) if word)


def _escaped(word: str) -> str:
    return "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\x{byte:02x}" for byte in word.encode("utf-8")
    )
