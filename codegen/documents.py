"""The generated texts for people: the reference, the environment page, the help of the command line."""

from __future__ import annotations

import textwrap

from codegen.model import Source
from codegen.templates import render
from torchturbo.config.keys import Key, shown, type_text

WIDTH = 80
INDENT = " " * 6


def reference(source: Source) -> str:
    """Return the reference of every key, one section a key so that a search finds it."""
    return render("reference.md.j2", source=source, groups=_groups(source), shown=shown, type_text=type_text)


def environment(source: Source) -> str:
    """Return the page of the environment variables."""
    keys = [key for key in source.keys if key.env]
    return render("environment.md.j2", keys=keys, shown=shown, prefix=source.variable_prefix)


def help_text(source: Source) -> str:
    """Return the text of the help option, wrapped for a terminal of 80 columns."""
    intro = "TorchTurbo options. They are taken off the command line; everything else goes on to the framework."
    lines = [*textwrap.wrap(intro, WIDTH), ""]
    for title, keys in _groups(source):
        listed = [key for key in keys if key.cli]
        if listed:
            lines += [f"{title}:"]
            for key in listed:
                lines += _option(key)
            lines.append("")
    lines += [f"  {source.help_flag}", f"{INDENT}Print this help.", ""]
    lines += textwrap.wrap(
        "Booleans take yes/no, true/false, t/f, y/n or 1/0; without a value they are true. "
        "`torchturbo config explain KEY` tells more about a key and what each layer says of it.",
        WIDTH,
    )
    return "\n".join(lines) + "\n"


def _option(key: Key) -> list[str]:
    value = "{" + ",".join(key.choices) + "}" if key.choices else key.metavar or ""
    if key.type == "boolean":
        value = f"[{value}]"
    facts = []
    if len(f"  {key.cli} {value}") > WIDTH:  # a long list reads better as a sentence
        value = key.metavar or ""
        facts.append(f"One of {', '.join(key.choices)}")
    if key.nullable and key.default is None:
        facts.append(f"Default: {key.null[0].lower()}{key.null[1:].rstrip('.')}")
    elif key.type != "array":
        facts.append(f"Default {shown(key.default)}")
    if key.env:
        facts.append(f"variable {key.env}")
    text = f"{key.text} ({'; '.join(facts)})" if facts else key.text
    body = textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    return [f"  {key.cli} {value}".rstrip(), *body]


def _groups(source: Source) -> list[tuple[str, list[Key]]]:
    """Return the keys by the section that a person looks for them in."""
    groups: list[tuple[str, list[Key]]] = []
    for section in source.sections:
        keys = [key for key in source.keys if not key.runtime and key.section == section.path]
        groups.append((section.path or "Top level", keys))
    groups.append(("One launch", [key for key in source.keys if key.runtime]))
    return groups
