"""The public surface in one file for review, and the shell completion."""

from __future__ import annotations

import json
from typing import Any

import shtab

from codegen.model import Source
from torchturbo.cli.parser import build_parser
from torchturbo.config.keys import Key, Section

PYTHON_TYPES = {"boolean": "bool", "integer": "int", "number": "float", "string": "str", "array": "list[str]"}


def listing(source: Source) -> str:
    """Return every flag, variable, path, type and default, so that a change of the surface is one readable diff."""
    described = {id(item) for item in source.specs}
    surface = {
        "inputs": [_section(item) if isinstance(item, Section) else _key(item) for item in source.specs],
        "file_only": [_key(key) for key in source.keys if not key.launch_only and id(key) not in described],
        "launcher_options": [source.help_flag, *(key.cli for key in source.keys if key.launch_only)],
        "rules": [f"{rule.left} {rule.op} {rule.right}" for rule in source.rules],
    }
    return json.dumps(surface, indent=1) + "\n"


def _key(key: Key) -> dict[str, Any]:
    kind = key.python or PYTHON_TYPES[key.type]
    unset = ([] if key.type == "array" else key.arg_default) if key.arg else None
    optional = key.arg and (key.nullable or unset is None)
    return {
        "name": key.name,
        "config_path": None if key.runtime else key.path,
        "args_name": key.arg,
        "cli_name": key.cli,
        "env_name": key.env,
        "type": kind,
        "metavar": key.metavar,
        "choices": list(key.choices) if key.spec_choices else None,
        "values": list(key.choices) or None,
        "minimum": key.minimum,
        "maximum": key.maximum,
        "action": key.action,
        "args_type": (f"{kind} | None" if optional else kind) if key.arg else None,
        "args_default": unset,
        "engine_default": key.default,
        "nullable": key.nullable,
        "aliases": [name for alias in key.aliases for name in (alias.path, alias.cli, alias.env) if name],
    }


def _section(section: Section) -> dict[str, Any]:
    blank = dict.fromkeys(("cli_name", "env_name", "metavar", "choices", "values", "minimum", "maximum", "action"))
    return {
        "name": section.arg,
        "config_path": section.path,
        "args_name": section.arg,
        "type": section.class_name,
        **blank,
        "args_type": section.class_name,
        "args_default": section.class_name,
        "engine_default": None,
        "nullable": False,
        "aliases": [],
    }


def completion(source: Source, shell: str) -> str:
    """Return the completion script of a shell."""
    # bash would offer no file names where an option is not known to take one: all of the framework's.
    script: str = shtab.complete(build_parser(source.keys, source.help_flag, list_options=True), shell=shell)
    script = script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F")
    return "\n".join(line.rstrip() for line in script.splitlines()) + "\n"
