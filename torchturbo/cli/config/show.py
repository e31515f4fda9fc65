"""``torchturbo config show``: every value, the layer that set it, and where it stands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchturbo.cli.terminal import BOLD, DIM, columns, fits, paint, wrap
from torchturbo.config.keys import shown
from torchturbo.config.layers import Layer, Reading
from torchturbo.config.merge import Merged, idle_paths, merge
from torchturbo.config.sources import read_layers
from torchturbo.engine.config import EngineConfig, config_of
from torchturbo.engine.dump import to_json, to_yaml


def run(options: argparse.Namespace, command_line: Reading) -> int:
    """Print the effective configuration of file, environment and command line."""
    named = command_line.settings.get("config_path")
    merged = merge(read_layers(command_line, named.value if named else None))
    config = config_of(merged)
    if options.format == "yaml":
        print(to_yaml(config, changed_only=options.changed), end="")
    elif options.format == "json":
        print(to_json(config, changed_only=options.changed), end="")
    else:
        print(_table(config, merged, changed_only=options.changed))
    return 0


def _table(config: EngineConfig, merged: Merged, *, changed_only: bool) -> str:
    changed = {setting.path for setting in config.changed()}
    idle = idle_paths(merged.values)
    rows = [("KEY", "VALUE", "LAYER", "PLACE", "NOTE")]
    styles: list[tuple[str, ...]] = [(BOLD,)]
    for path, setting in merged.settings.items():
        if changed_only and path not in changed:
            continue
        note = "idle" if path in idle and setting.origin.layer > Layer.DEFAULT else ""
        rows.append((path, shown(setting.value), setting.origin.layer.label, setting.origin.place, note))
        styles.append((BOLD,) if path in changed else (DIM,) if note else ())
    if len(rows) == 1:
        return "every key has its default"
    legend = []
    if any("idle" in row[4] for row in rows[1:]):
        legend.append("idle: set, but another key keeps it from being read; `config explain KEY` says which")
    table = columns(rows, styles)
    if not fits(table):
        table, legend = _narrow(rows[1:], styles[1:]), [wrap(line) for line in legend]
    return "\n".join([table, *(["", *(paint(line, DIM) for line in legend)] if legend else [])])


def _narrow(rows: Sequence[Sequence[str]], styles: Sequence[Sequence[str]]) -> str:
    """Return two lines a key: the key with its value, and below them where that comes from."""
    lines = []
    for (path, value, layer, place, note), style in zip(rows, styles, strict=True):
        lines.append(paint(f"{path} = {value}", *style))
        lines.append(paint("  " + ", ".join(part for part in (layer, place, note) if part), DIM))
    return "\n".join(lines)
