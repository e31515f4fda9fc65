"""The programs that the start-up benchmark compares: the same options, read by each library.

Each is written out as a module of its own from the facts of the public option table, because a main script is
compiled on every start while an imported module comes from its ``.pyc``, as a real program's does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from torchturbo.config.keys import Key
from torchturbo.engine.args import TorchTurboArgs, TurboArgSpec, get_arg_specs
from torchturbo.engine.dump import scalar
from torchturbo.generated.keys import FLAG_PREFIX, KEYS

HELP_FLAG = f"{FLAG_PREFIX}help"
LIST = object()
"""Default of an option that may be given several times."""


class Option(NamedTuple):
    """One option as a field of a flat dataclass and as an argument of a parser."""

    spec: TurboArgSpec
    key: Key
    flag: str
    field: str
    """The flag without its dashes: libraries that derive flags from fields then make the same ones."""
    default: Any

    @property
    def type(self) -> str:
        """Source text of the value's type."""
        return {"boolean": "bool", "integer": "int", "number": "float"}.get(self.key.type, "str")

    @property
    def annotation(self) -> str:
        """Source text of the field's type, as precise as the table says."""
        return self._optional(f"Literal{list(self.spec.choices)!r}" if self.spec.choices else self.type)

    @property
    def plain(self) -> str:
        """Source text of the field's type without ``typing``, which a hand-written program need not import."""
        return self._optional(self.type)

    def _optional(self, text: str) -> str:
        if self.default is LIST:
            return "list[str]"
        return f"{text} | None" if self.default is None or self.key.nullable else text

    @property
    def default_text(self) -> str:
        """Source text of the field's default."""
        return "field(default_factory=list)" if self.default is LIST else repr(self.default)

    @property
    def value(self) -> Any:
        """A value that somebody would give."""
        return value_of(self.key)


def value_of(key: Key) -> Any:
    """Return a value that leaves no other key idle: everything on, and the last choice."""
    if key.type == "boolean":
        return True
    if key.choices:
        return key.choices[-1]
    return key.examples[0] if key.examples else key.default


def options() -> list[Option]:
    """Return the options of the public table."""
    defaults = {field.name: LIST if field.default is MISSING else field.default for field in fields(TorchTurboArgs)}
    by_flag = {key.cli: key for key in KEYS.values()}
    found = []
    for spec in get_arg_specs():
        if spec.cli_name is not None:
            default = getattr(defaults.get(spec.args_name or ""), "name", defaults.get(spec.args_name or ""))
            found.append(Option(spec, by_flag[spec.cli_name], spec.cli_name, spec.cli_name[2:], default))
    return found


def argv(given: Iterable[Option], values: Mapping[str, Any] | None = None) -> list[str]:
    """Return a command line that sets options to usual values, or to these by key."""
    return [word for option in given for word in (option.flag, str((values or {}).get(option.key.path, option.value)))]


def in_files(given: Iterable[Option]) -> list[Option]:
    """Return the options that a configuration file may hold."""
    return [option for option in given if not option.key.runtime]


def nested_file(paths: Iterable[str]) -> str:
    """Return a configuration file for TorchTurbo that sets some keys."""
    lines: list[str] = []
    written: list[str] = []
    for path in paths:
        *sections, name = path.split(".")
        shared = 0
        while shared < min(len(sections), len(written)) and sections[shared] == written[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        lines.append(f"{'  ' * len(sections)}{name}: {scalar(value_of(KEYS[path]))}")
        written = sections
    return "\n".join(lines) + "\n"


def flat_file(given: Iterable[Option]) -> str:
    """Return a file for the libraries: no sections, which spares them nested classes."""
    return "".join(f"{option.field}: {scalar(option.value)}\n" for option in given)


# -- modules ----------------------------------------------------------------------------------------------------------

_FIELD_CLASS = """\
from dataclasses import dataclass, field
from typing import Literal

@dataclass
class Options:
{fields}
"""

_ARGPARSE = """\
import argparse
from dataclasses import dataclass, field

def string_to_bool(text):
    word = text.lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected a boolean, got {{text!r}}")

@dataclass
class Options:
{fields}

def main(argv):
    parser = argparse.ArgumentParser()
{arguments}
    return Options(**vars(parser.parse_args(argv)))
"""

_TORCHTURBO = """\
from torchturbo.engine.args import parse_torchturbo_args

def main(argv):
    return parse_torchturbo_args(argv)[0]
"""

_TORCHTURBO_FILE = """\
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args

def main(argv):
    return build_from_args(parse_torchturbo_args(argv)[0])
"""

_TORCHTURBO_COMMAND = """\
from torchturbo.cli.main import main as run

def main(argv):
    return run(argv)
"""

_TYRO = """\
import tyro
{options}
def main(argv):
    return tyro.cli(Options, args=argv, config=(tyro.conf.FlagConversionOff,))
"""

_TYRO_FILE = """\
import tyro, yaml
{options}
def main(argv):
    with open({file!r}, encoding="utf-8") as file:
        default = Options(**yaml.safe_load(file))
    return tyro.cli(Options, args=argv, default=default, config=(tyro.conf.FlagConversionOff,))
"""

_JSONARGPARSE = """\
from jsonargparse import ArgumentParser
{options}
def main(argv):
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Options)
    parsed = parser.parse_args({extra}argv).as_dict()
    parsed.pop("config", None)
    return Options(**parsed)
"""

_PYDANTIC = """\
from typing import Literal
from pydantic_settings import BaseSettings, SettingsConfigDict, YamlConfigSettingsSource

class Options(BaseSettings):
{fields}
{sources}
def main(argv):
    return Options(_cli_parse_args=argv)
"""

_PYDANTIC_FILE = """\
    model_config = SettingsConfigDict(yaml_file={file!r})

    @classmethod
    def settings_customise_sources(cls, settings_cls, init_settings, **others):
        return init_settings, YamlConfigSettingsSource(settings_cls)
"""

_HF = """\
from transformers.hf_argparser import HfArgumentParser
{options}
def main(argv):
    return HfArgumentParser(Options).parse_args_into_dataclasses(args=argv)[0]
"""

_HF_FILE = """\
import yaml
from transformers.hf_argparser import HfArgumentParser
{options}
def main(argv):
    parser = HfArgumentParser(Options)
    with open({file!r}, encoding="utf-8") as file:
        parser.set_defaults(**yaml.safe_load(file))
    return parser.parse_args_into_dataclasses(args=argv)[0]
"""


def modules(given: list[Option], files: dict[str, Path]) -> dict[str, str]:
    """Return the text of each module by its name, as in ``tyro`` and, for one that reads a file, ``tyro_small``."""
    annotated = "\n".join(f"    {option.field}: {option.annotation} = {option.default_text}" for option in given)
    flat = _FIELD_CLASS.format(fields=annotated)
    texts = {
        "argparse": _argparse(given),
        "torchturbo": _TORCHTURBO,
        "torchturbo_command": _TORCHTURBO_COMMAND,
        "tyro": _TYRO.format(options=flat),
        "jsonargparse": _JSONARGPARSE.format(options=flat, extra=""),
        "pydantic_settings": _PYDANTIC.format(
            fields=annotated.replace("field(default_factory=list)", "[]"), sources=""
        ),
        "transformers": _HF.format(options=flat),
    }
    for name, path in files.items():
        file = str(path)
        texts[f"torchturbo_{name}"] = _TORCHTURBO_FILE
        texts[f"tyro_{name}"] = _TYRO_FILE.format(options=flat, file=file)
        texts[f"jsonargparse_{name}"] = _JSONARGPARSE.format(options=flat, extra=f'["--config", {file!r}] + ')
        texts[f"pydantic_settings_{name}"] = _PYDANTIC.format(
            fields=annotated.replace("field(default_factory=list)", "[]"), sources=_PYDANTIC_FILE.format(file=file)
        )
        texts[f"transformers_{name}"] = _HF_FILE.format(options=flat, file=file)
    return texts


def _argparse(given: list[Option]) -> str:
    """Return the program that somebody would write by hand: plain argparse, and one dataclass that it fills."""
    lines = []
    for option in given:
        spec = option.spec
        words = [repr(option.flag), f"default={'[]' if option.default is LIST else repr(option.default)}"]
        if option.type == "bool":
            words += ["type=string_to_bool", "nargs='?'", "const=True"]
        elif option.type != "str":
            words.append(f"type={option.type}")
        words += [
            f"{name}={getattr(spec, name)!r}"
            for name in ("choices", "action", "metavar", "help")
            if getattr(spec, name) is not None
        ]
        lines.append(f"    parser.add_argument({', '.join(words)})")
    return _ARGPARSE.format(
        fields="\n".join(f"    {option.field}: {option.plain} = {option.default_text}" for option in given),
        arguments="\n".join(lines),
    )
