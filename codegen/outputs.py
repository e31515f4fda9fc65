"""The list of generated files. Each is a function of the source that returns the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from codegen import documents, editor, python, surface
from codegen.model import Source
from torchturbo.cli.parser import SHELLS

ROOT = Path(__file__).parent.parent
GENERATED = Path("generated")

OUTPUTS: dict[str, Callable[[Source], str]] = {
    "__init__.py": python.package,
    "args.py": python.flat_arguments,
    "config.py": python.sections,
    "keys.py": python.key_table,
    "specs.py": python.spec_table,
    "validator.py": python.validator,
    "torchturbo.schema.json": editor.schema,
    "help.txt": documents.help_text,
    "docs/reference.md": documents.reference,
    "docs/environment.md": documents.environment,
    **{f"completion/torchturbo.{shell}": partial(surface.completion, shell=shell) for shell in SHELLS},
    "surface.json": surface.listing,
}


def outputs(source: Source) -> dict[Path, str]:
    """Return the text of every generated file by its path from the root of the repository."""
    return {GENERATED / name: write(source) for name, write in OUTPUTS.items()}
