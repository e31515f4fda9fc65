"""``torchturbo config init``: a configuration to start from, every key commented out at its default."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

from torchturbo.cli.config.schema import SCHEMA
from torchturbo.config.keys import Key, Section
from torchturbo.engine.dump import scalar
from torchturbo.errors import Problem, fail
from torchturbo.generated.keys import KEYS, SECTIONS

WIDTH = 100


def run(options: argparse.Namespace) -> int:
    """Write the file, or print it; a file that exists is left alone."""
    text = commented(SCHEMA)
    if options.file == "-":
        print(text, end="")
        return 0
    try:
        with open(options.file, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        fail([Problem(options.file, "", "exists already", "name another file, or - to print")])
    except (OSError, ValueError) as error:
        fail([Problem(options.file, "", getattr(error, "strerror", None) or str(error))])
    print(f"wrote {options.file}; take the # off what you want to set, then: torchturbo config validate {options.file}")
    return 0


def commented(schema: Path) -> str:
    """Return the text of the file. The first line tells editors which schema to check it against."""
    head = [
        f"# $schema: {schema}",
        "# Every key at its default. Take the # off what you want to set.",
        "",
    ]
    return "\n".join([*head, *_section(SECTIONS[""], "")]) + "\n"


def _section(section: Section, indent: str) -> Iterator[str]:
    for name in section.names:
        path = f"{section.path}.{name}" if section.path else name
        if path in SECTIONS:
            yield from _comment(SECTIONS[path].text, indent)
            yield f"{indent}{name}:"
            yield from _section(SECTIONS[path], f"{indent}  ")
        else:
            yield from _comment(_text(KEYS[path]), indent)
            yield f"{indent}# {name}: {scalar(KEYS[path].default)}"
        if not indent:
            yield ""


def _text(key: Key) -> str:
    parts = [key.text]
    if len(key.choices) > 1:
        parts.append(f"One of: {', '.join(key.choices)}.")
    return " ".join(parts)


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
