"""Write the generated files, or check them: ``python -m codegen [--check]``."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from codegen.outputs import GENERATED, ROOT, outputs
from codegen.source import SchemaError, read_source
from torchturbo.errors import wants_colour

SCHEMA = Path("schema/torchturbo.schema.json")
META = Path("schema/torchturbo.meta.schema.json")
REMEDY = "run `nox -s codegen` and commit the result"
INVALID, STALE = 2, 1


def main(argv: list[str] | None = None) -> int:
    """Return 0 when generated/ is what the schema says, 1 when ``--check`` found it stale, 2 for an invalid schema."""
    parser = argparse.ArgumentParser(prog="python -m codegen", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; print a diff and exit 1 on drift")
    check = parser.parse_args(argv).check
    try:
        files = outputs(read_source(ROOT / SCHEMA, ROOT / META))
    except SchemaError as error:
        print(f"{SCHEMA} is not valid:\n{error}", file=sys.stderr)
        return INVALID
    return _check(files) if check else _write(files)


def _write(files: dict[Path, str]) -> int:
    for path, text in files.items():
        target = ROOT / path
        if _committed(target) != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote {path}")
    for path in _strays(files):
        (ROOT / path).unlink()
        print(f"removed {path}, which nothing generates any more")
    return 0


def _check(files: dict[Path, str]) -> int:
    stale = []
    for path, text in files.items():
        old = _committed(ROOT / path)
        if old != text:
            stale.append(path)
            sys.stdout.writelines(_diff(path, old or "", text))
    for path in _strays(files):
        stale.append(path)
        print(f"{path}: nothing generates this file")
    if not stale:
        return 0
    if os.environ.get("GITHUB_ACTIONS"):
        for path in stale:
            print(f"::error file={path},title=Stale generated file::{REMEDY}")
    sys.stdout.flush()
    print(f"\n{len(stale)} generated file{'s are' if len(stale) > 1 else ' is'} stale: {REMEDY}", file=sys.stderr)
    return STALE


def _committed(path: Path) -> str | None:
    # Bytes, so that a changed line ending is a difference too.
    return path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None


def _strays(files: Iterable[Path]) -> list[Path]:
    present = {path.relative_to(ROOT) for path in (ROOT / GENERATED).rglob("*") if path.is_file()}
    return sorted(path for path in present - set(files) if "__pycache__" not in path.parts)


def _diff(path: Path, old: str, new: str) -> Iterator[str]:
    colours = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"} if wants_colour(sys.stdout) else {}
    committed, wanted = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for line in difflib.unified_diff(committed, wanted, f"{path} (committed)", f"{path} (from the schema)"):
        text = line if line.endswith("\n") else f"{line}\n\\ no newline at end of file\n"
        colour = colours.get(line[0])
        yield f"{colour}{text.rstrip(chr(10))}\033[0m\n" if colour else text


if __name__ == "__main__":
    sys.exit(main())
