"""``torchturbo config explain KEY``: all there is to know about one key, and what each layer says of it now."""

from __future__ import annotations

import argparse
import os

from torchturbo.cli.terminal import BOLD, DIM, columns, definitions, paint, wrap
from torchturbo.config.keys import Key, Section, shown, type_text
from torchturbo.config.layers import Layer, Reading, former_names
from torchturbo.config.merge import Merged, merge
from torchturbo.config.names import did_you_mean, nearest
from torchturbo.config.sources import read_layers
from torchturbo.errors import Problem, fail, shorten
from torchturbo.generated.keys import FLAG_PREFIX, KEYS, SECTIONS


def run(options: argparse.Namespace, command_line: Reading) -> int:
    """Print one key, or the keys of a section; problems of the layers follow on stderr with status 2."""
    name: str = options.key
    section = find_section(name)
    if section is not None:
        print(_section(section))
        return 0
    key = find(name)
    named = command_line.settings.get("config_path")
    merged = merge(read_layers(command_line, named.value if named else None))
    print(_key(key, merged))
    if merged.problems:
        fail(merged.problems)
    return 0


def find_section(name: str) -> Section | None:
    """Return the section that a person means by its path, its field, or the last part of its path."""
    for section in SECTIONS.values():
        if section.path and name in (section.path, section.arg, section.path.rpartition(".")[2]):
            return section
    return None


def find(name: str) -> Key:
    """Return the key that a person means by a path, an option, a variable, a field or a former name.

    Raises
    ------
    ConfigError
        If there is no such key; the nearest names are in its text.
    """
    flag = name if name.startswith("--") else f"--{name}"
    for key in KEYS.values():
        if name in (key.path, key.env, key.arg, key.name) or (
            key.cli == flag and name.startswith((FLAG_PREFIX, FLAG_PREFIX[2:]))
        ):
            return key
    for kind in ("path", "cli", "env"):
        former = former_names(KEYS, kind)
        if name in former or flag in former:
            return former[name if name in former else flag][0]
    leaves = [path for path in KEYS if path.rpartition(".")[2] == name]
    if len(leaves) == 1:
        return KEYS[leaves[0]]
    if not leaves and (close := nearest(name, [path.rpartition(".")[2] for path in KEYS])):
        leaves = [path for path in KEYS if path.rpartition(".")[2] == close[0]]
    known = [*KEYS, *filter(None, SECTIONS), *(key.cli for key in KEYS.values() if key.cli)]
    remedy = f"did you mean {' or '.join(leaves)}?" if leaves else did_you_mean(name, known, limit=3)
    fail([Problem("", "", f"there is no key {shorten(name)!r}", remedy or "`torchturbo config show` lists them all")])


def _section(section: Section) -> str:
    rows = []
    for name in section.names:
        path = f"{section.path}.{name}"
        item: Key | Section = KEYS[path] if path in KEYS else SECTIONS[path]
        rows.append((f"  {path}", item.text.partition(". ")[0].rstrip(".")))
    return "\n".join([paint(section.path, BOLD), wrap(section.text, "  "), "", definitions(rows)])


def _key(key: Key, merged: Merged) -> str:
    facts = [("type", type_text(key)), ("default", shown(key.default))]
    if key.nullable:
        facts.append(("null", key.null))
    if key.cli:
        facts.append(("option", f"{key.cli} {key.metavar or ''}".rstrip()))
    if key.env:
        facts.append(("variable", key.env))
    facts.append(("file", _in_file(key)))
    if key.active_when:
        facts.append(("read when", " and ".join(map(str, key.active_when))))
    for alias in key.aliases:
        old = ", ".join(name for name in (alias.path, alias.cli, alias.env) if name)
        facts.append(("former name", f"{old}, read until {alias.removal}"))
    if key.deprecated:
        text = f"since {key.deprecated.since}, goes away in {key.deprecated.removal}"
        facts.append(("deprecated", f"{text}; use {key.deprecated.successor}" if key.deprecated.successor else text))
    facts.append(("since", key.since))
    parts = [paint(key.path, BOLD), wrap(key.text, "  "), "", definitions((f"  {name}", text) for name, text in facts)]
    if key.choices:
        rows = zip((f"  {choice}" for choice in key.choices), key.values, strict=True)
        parts += ["", "  values", definitions(rows)]
    return "\n".join([*parts, "", _layers(key, merged)])


def _layers(key: Key, merged: Merged) -> str:
    """Return what each layer says, the highest first, with the one that holds marked."""
    said = {setting.origin.layer: setting for setting in merged.history.get(key.path, ())}
    winner = merged.settings[key.path].origin.layer
    rows, styles = [], []
    for layer in sorted(Layer, reverse=True):
        if layer is Layer.FRAMEWORK:
            continue  # nobody has told it anything here
        if layer is Layer.DEFAULT:
            value, place = shown(key.default), ""
        elif layer in said:
            value, place = shown(said[layer].value), said[layer].origin.place
        else:
            value, place = "-", _silence(key, layer)
        mark = ">" if layer is winner else " "
        rows.append((f"{mark} {layer.label}", value, place))
        styles.append((BOLD,) if layer is winner else (DIM,))
    return "\n".join(["  now", columns(rows, styles)])


def _silence(key: Key, layer: Layer) -> str:
    if layer is Layer.ENVIRONMENT and key.env and not os.environ.get(key.env, "unset").strip():
        return f"{key.env} is empty and counts as unset"
    unreachable = (layer is Layer.ENVIRONMENT and not key.env) or (layer is Layer.COMMAND_LINE and not key.cli)
    if unreachable or (layer is Layer.FILE and key.runtime):
        return "cannot set it"
    return ""


def _in_file(key: Key) -> str:
    """Return how the key is written in a YAML file, on one line."""
    if key.runtime:
        return "no: it belongs to one launch"
    *sections, name = key.path.split(".")
    text = f"{name}: {shown(key.examples[0])}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text
