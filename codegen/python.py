"""The generated Python modules: dataclasses, key table, spec table, environment map, validator."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from datamodel_code_generator import Formatter, InputFileType, LiteralType, PythonVersion, generate
from datamodel_code_generator.enums import DataModelType

from codegen.model import Schema, Source
from codegen.templates import HEADER, render
from torchturbo.config.keys import Key, Record, Section

ROOT = Path(__file__).parent.parent
FLAT = "TorchTurboArgs"


def package(source: Source) -> str:
    """Return the package's own module."""
    return _formatted("__init__.py", f'# {HEADER}\n"""Everything that is generated from the schema."""\n')


def flat_arguments(source: Source) -> str:
    """Return the module of TorchTurboArgs and of the one section that it holds whole.

    It is a module of its own because parsing a command line needs nothing else: the other section
    classes cost a launch their construction only where a configuration is built.
    """
    held = [section.class_name for section in source.sections if section.arg]
    frozen, mutable = _classes(_sections_schema(source), frozen=True), _classes(_flat_schema(source), frozen=False)
    imports = [
        "from torchturbo.config.launch import Launch",
        "from torchturbo.config.values import FrozenValues, frozen",
        "from torchturbo.logging import LogLevel",
    ]
    parts = [frozen[name] for name in held] + [mutable[FLAT]]
    return _module("args.py", "The flat arguments of a command line.", imports, parts)


def sections(source: Source) -> str:
    """Return the module of the nested configuration classes."""
    held = [section.class_name for section in source.sections if section.arg]
    classes = _classes(_sections_schema(source), frozen=True)
    imports = [
        "from torchturbo.config.values import FrozenValues, frozen",
        f"from torchturbo.generated.args import {', '.join(held)}",
        "from torchturbo.logging import LogLevel",
    ]
    table = "".join(f"    {section.path!r}: {section.class_name},\n" for section in source.sections)
    listing = f'SECTION_CLASSES: dict[str, type[Any]] = {{\n{table}}}\n"""Class of each section by its path."""\n'
    parts = [text for name, text in classes.items() if name not in held]
    return _module("config.py", "The configuration as nested dataclasses.", imports, [*parts, listing])


def key_table(source: Source) -> str:
    """Return the table of keys, sections and rules."""
    return _formatted(
        "keys.py",
        render(
            "keys.py.j2",
            keys=[_call(key) for key in source.keys],
            sections=[_call(section) for section in source.sections],
            rules=[_call(rule) for rule in source.rules],
            environment={key.env: key.path for key in source.keys if key.env},
            flag_prefix=source.flag_prefix,
            variable_prefix=source.variable_prefix,
        ),
    )


def spec_table(source: Source) -> str:
    """Return the table of TurboArgSpec, in the order of the public table."""
    specs = [_spec(item) for item in source.specs]
    return _formatted("specs.py", render("specs.py.j2", specs=specs))


def validator(source: Source) -> str:
    """Return the checks of each key and the cross-key rules as plain calls."""
    checks = {key.path: _check(key) for key in source.keys}
    return _formatted("validator.py", render("validator.py.j2", checks=checks, rules=source.rules))


# -- dataclasses ------------------------------------------------------------------------------------------------------


def _sections_schema(source: Source) -> Schema:
    definitions = {name: _plain(body) for name, body in source.schema["$defs"].items()}
    root = {name: source.schema[name] for name in ("description", "type", "additionalProperties", "properties")}
    definitions[source.sections[0].class_name] = _plain(root)
    base = {"customBasePath": "torchturbo.config.values.FrozenValues"}
    return {name: body | base for name, body in definitions.items()}


def _flat_schema(source: Source) -> Schema:
    properties: dict[str, Any] = {}
    for item in source.inputs:
        if isinstance(item, Section):
            if item.arg:
                properties[item.arg] = {"$ref": f"#/$defs/{item.class_name}", "default": {}}
        elif item.arg:
            properties[item.arg] = _flat_property(item)
    properties["config_overrides"] = {
        "description": "Options given on the command line, by their name without dashes; inputs of the launch left out.",
        "type": "object",
        "additionalProperties": True,
        "default": {},
    }
    flat = {
        "description": "What the command line said; None means that an option was not given.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "customBasePath": "torchturbo.config.launch.Launch",
    }
    return {**_sections_schema(source), FLAT: flat}


def _flat_property(key: Key) -> Schema:
    unset = [] if key.type == "array" else key.arg_default
    optional = key.nullable or unset is None
    body: Schema = {"description": key.text, "type": [key.type, "null"] if optional else key.type, "default": unset}
    if key.type == "array":
        body["items"] = {"type": "string"}
    if key.choices:
        body["enum"] = [*key.choices, None] if optional else list(key.choices)
    return _typed(body, key.python)


def _plain(body: Schema) -> Schema:
    """Return an object without annotations, for a generator that would carry them into its output."""
    plain = copy.deepcopy(body)
    plain.pop("x-torchturbo", None)
    for name, child in plain["properties"].items():
        notes = child.pop("x-torchturbo", {})
        child.pop("examples", None)
        plain["properties"][name] = _typed(child, notes.get("python"))
    return plain


def _typed(body: Schema, enumeration: str | None) -> Schema:
    if enumeration is None:
        return body
    named = {"type": "string", "customTypePath": f"torchturbo.logging.{enumeration}"}
    return {name: body[name] for name in ("description", "default")} | named


def _classes(definitions: Schema, *, frozen: bool) -> dict[str, str]:
    """Return the source text of each dataclass of a set of definitions, by its name."""
    text = generate(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions},
        input_file_type=InputFileType.JsonSchema,
        output_model_type=DataModelType.DataclassesDataclass,
        target_python_version=PythonVersion.PY_311,
        skip_root_model=True,
        strict_nullable=True,
        strict_refs=True,
        enum_field_as_literal=LiteralType.All,
        use_schema_description=True,
        use_field_description=True,
        use_single_line_docstring=True,
        dataclass_arguments={"kw_only": True, "frozen": True} if frozen else {"kw_only": True},
        custom_file_header="# cut apart below",
        formatters=[Formatter.BUILTIN],  # reads no configuration; _formatted() applies the project's own
    )
    assert isinstance(text, str)
    # The generator knows an enumeration's name but writes the default as it stands in the schema,
    text = re.sub(r": (LogLevel) = '(\w+)'", r": \1 = \1.\2", text)
    if frozen:  # and it knows no immutable list.
        text = text.replace("list[str] = field(default_factory=list)", "tuple[str, ...] = ()")
    # torchturbo/config/values.py says why; the generator knows no other decorator and no arguments that are False.
    text = text.replace("@dataclass(frozen=True, kw_only=True)", "@frozen")
    text = text.replace("@dataclass(kw_only=True)", "@dataclass(kw_only=True, eq=False, repr=False)")
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: "".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) for node in nodes}


def _module(name: str, subject: str, imports: list[str], parts: list[str]) -> str:
    head = [
        f'# {HEADER}\n"""{subject}"""\n',
        "from __future__ import annotations\n",
        "from dataclasses import dataclass, field\nfrom typing import Any, Literal\n",
        "\n".join(imports) + "\n",
    ]
    return _formatted(name, "\n".join(head) + "\n\n" + "\n\n".join(parts))


# -- tables -----------------------------------------------------------------------------------------------------------


def _call(record: Record) -> str:
    """Return the constructor call of a record, without the fields that have their default."""
    given = {name: value for name, value in vars(record).items() if getattr(type(record), name, ...) != value}
    return f"{type(record).__name__}({', '.join(f'{name}={_literal(value)}' for name, value in given.items())})"


def _literal(value: Any) -> str:
    if isinstance(value, Record):
        return _call(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


CONVERTERS = {"boolean": "string_to_bool", "integer": "int", "number": "float", "LogLevel": "parse_log_level"}


def _spec(item: Key | Section) -> str:
    if isinstance(item, Section):
        fields: dict[str, Any] = {"name": item.arg, "config_path": item.path, "args_name": item.arg, "help": item.text}
        return "TurboArgSpec(" + ", ".join(f"{name}={value!r}" for name, value in fields.items()) + ")"
    fields = {
        "name": item.name,
        "config_path": None if item.runtime else item.path,
        "args_name": item.arg,
        "cli_name": item.cli,
        "env_name": item.env,
        "metavar": item.metavar,
        "choices": item.choices if item.spec_choices else None,
        "action": item.action,
        "help": item.text.replace("%", "%%"),  # argparse formats help with %
    }
    words = [f"{name}={value!r}" for name, value in fields.items() if value is not None]
    converter = CONVERTERS.get(item.python or item.type)
    if converter:
        words.insert(-1, f"type={converter}")
    return f"TurboArgSpec({', '.join(words)})"


def _check(key: Key) -> str:
    named: dict[str, Any] = {}
    if key.type in ("integer", "number"):
        named |= {
            name: value for name, value in (("minimum", key.minimum), ("maximum", key.maximum)) if value is not None
        }
    if key.type == "array" and key.pattern:
        named |= {"pattern": key.pattern, "form": key.form}
    if key.nullable:
        named["nullable"] = True
    check = "one_of" if key.choices else {"array": "strings"}.get(key.type, key.type)
    words = [repr(choice) for choice in key.choices] + [f"{name}={value!r}" for name, value in named.items()]
    return f"{check}({', '.join(words)})"


def _formatted(name: str, text: str) -> str:
    """Lint and format a module by the project's own settings, as if it lay where it will be written."""
    for command in (["check", "--fix", "--unsafe-fixes", "--quiet"], ["format"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml")]
            + ["--stdin-filename", str(ROOT / "generated" / name), "-"],
            input=text,
            text=True,
            encoding="utf-8",
            capture_output=True,
            cwd=ROOT,
        )
        if done.returncode:
            raise RuntimeError(f"ruff {command[0]} generated/{name}:\n{done.stdout[-2000:]}{done.stderr}")
        text = done.stdout
    return text


__all__ = ["flat_arguments", "key_table", "package", "sections", "spec_table", "validator"]
