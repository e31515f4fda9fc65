"""The argparse tree of the ``torchturbo`` command: what help and shell completion know."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from torchturbo.cli.arguments import Parser
from torchturbo.cli.plan import add_options as add_plan_options
from torchturbo.cli.quickstart import add_options as add_quickstart_options
from torchturbo.config.keys import Key

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # argparse has no public name for it

SHELLS = ("bash", "zsh", "fish")
FILE = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path)"}
"""shtab's completion of a file name in each shell."""


def build_parser(keys: Iterable[Key], help_flag: str, *, list_options: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the whole command.

    TorchTurbo's own options hang on every sub-command that takes them, for completion's sake. Where a command
    runs they have been taken off the line before argparse sees it, by rules that argparse does not have; its own
    help names only the option that prints them all, unless ``list_options``.
    """
    keys = list(keys)
    plugins = next(key for key in keys if key.path == "plugins")
    keys = [key for key in keys if list_options and key.cli]
    parser = Parser(
        prog="torchturbo",
        description="Fine-tune Hugging Face models with the TorchTurbo engine.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"First run: torchturbo quickstart. All engine options: torchturbo train {help_flag}",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    train = _command(commands, "train", "fine-tune a model (add the options of Transformers' TrainingArguments)")
    _add_options(train, keys, help_flag)
    plan = _command(commands, "plan", "what `train` with these options would do and need on N ranks")
    add_plan_options(plan)
    _add_options(plan, keys, help_flag)
    factory = _command(commands, "llamafactory", "run LLaMA-Factory's training (its file, KEY=VALUE, its flags)")
    _complete_files(factory.add_argument("file", metavar="FILE", nargs="?", help="its YAML or JSON file"))
    _add_options(factory, keys, help_flag)
    add_quickstart_options(_command(commands, "quickstart", "train a small model on this machine, from nothing"))
    _add_config_commands(commands, keys, plugins, help_flag)
    doctor = _command(commands, "doctor", "what can train here and what is missing; exit status 1 if nothing can")
    doctor.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    completion = _command(commands, "completion", "print a shell completion script")
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _add_config_commands(commands: Commands, keys: list[Key], plugins: Key, help_flag: str) -> None:
    config = _command(commands, "config", "show, explain, check and start configurations")
    actions = config.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    show = _command(actions, "show", "the effective configuration: each value, its layer and where it stands")
    show.add_argument("--format", choices=("table", "yaml", "json"), default="table", help="default: table")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    _add_options(show, keys, help_flag)

    explain = _command(actions, "explain", "one key: text, type, default, names, and what each layer says of it")
    explain.add_argument("key", metavar="KEY", help="path, option or variable, as in parallel_plan.sp_size")
    _add_options(explain, keys, help_flag)

    validate = _command(actions, "validate", "check configuration files; exit status 1 if one is wrong")
    _complete_files(validate.add_argument("files", metavar="FILE", nargs="+", help="YAML or JSON"))
    validate.add_argument("--format", choices=("text", "json", "github"), default="text", help="default: text")
    _add_plugin(validate, plugins, "check the files as settings of a plugin; runs the plugin's code")

    init = _command(actions, "init", "write a commented configuration to start from")
    _complete_files(
        init.add_argument(
            "file", metavar="FILE", nargs="?", default="turbo.yaml", help="default: turbo.yaml; - prints it"
        )
    )

    schema = _command(actions, "schema", "print the JSON Schema that editors read")
    of_what = schema.add_mutually_exclusive_group()
    of_what.add_argument("--path", action="store_true", help="print the path of the installed file instead")
    _add_plugin(of_what, plugins, "print the schema of a plugin's settings file instead; runs the plugin's code")


def _add_plugin(place: argparse._ActionsContainer, plugins: Key, text: str) -> None:
    _complete_files(place.add_argument(plugins.cli or "", dest="plugin", metavar=plugins.metavar, help=text))


def _command(commands: Commands, name: str, text: str) -> Parser:
    parser: Parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    return parser


def _add_options(parser: argparse.ArgumentParser, keys: list[Key], help_flag: str) -> None:
    group = parser.add_argument_group("TorchTurbo options", f"set any key of the configuration; listed by {help_flag}")
    for key in keys:
        words = key.choices or (("true", "false") if key.type == "boolean" else None)
        option = group.add_argument(
            key.cli or "",
            dest=f"option {key.path}",
            choices=words,
            nargs="?" if key.type == "boolean" else None,
            metavar=key.metavar,
            help=key.text.partition(". ")[0].rstrip(".").replace("%", "%%"),  # argparse formats it
        )
        if key.path == "config_path" or key.type == "array":
            _complete_files(option)
    group.add_argument(help_flag, action="store_true", help="print all of them and exit")


def _complete_files(option: argparse.Action) -> None:
    option.complete = FILE  # type: ignore[attr-defined]
