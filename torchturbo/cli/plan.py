"""``torchturbo plan``: what a launch on some number of ranks would do, need and meet; nothing is launched."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from torchturbo.cli.arguments import Parser
from torchturbo.errors import BAD_INPUT, Problem, fail, print_errors

MODEL, FULL_NAME = "--model", "--model_name_or_path"
MOST_RANKS = 1_000_000


def add_options(parser: Parser) -> list[argparse.Action]:
    """Add the options of the plan itself; those of training and TorchTurbo's own may stand beside them."""
    return [
        parser.add_argument("--world_size", metavar="N", help="ranks of the launch, on all nodes together (required)"),
        parser.add_argument("--ranks_per_node", metavar="N", default="8", help="default: 8"),
        parser.add_argument("--memory", metavar="SIZE", help="device memory of one rank, such as 80GiB"),
        parser.add_argument(MODEL, metavar="MODEL", help=f"short form of {FULL_NAME}; its weights are not read"),
        parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text"),
    ]


def run(words: Sequence[str]) -> int:
    """Print the plan; return 0, or 2 where the launch would stop at an error."""
    from torchturbo.cli.train import asks_for_help
    from torchturbo.generated.keys import FLAG_PREFIX

    if asks_for_help(list(words)):
        _parser().print_help()
        return 0
    if f"{FLAG_PREFIX}help" in words:
        from torchturbo.engine.args import help_text

        print(help_text(), end="")
        return 0
    options, rest = _take_options(words)
    from torchturbo.plan.examine import Request, examine
    from torchturbo.plan.report import as_json
    from torchturbo.plan.table import as_text
    from torchturbo.train.commandline import MissingLibrary

    request = Request(rest, options.world_size, options.ranks_per_node, options.memory)
    try:
        plan = examine(request)
    except MissingLibrary as error:
        fail([Problem("", "", f"{error.name} is not installed", "pip install 'torchturbo[train]'")])
    print(as_json(plan) if options.format == "json" else as_text(plan), flush=True)
    if plan.errors and options.format == "text":
        if sys.stdout.isatty() and sys.stderr.isatty():
            print()
        found = len(plan.errors)
        print_errors([f"the launch would stop at {f'{found} errors' if found > 1 else '1 error'}: the plan tells them"])
    return BAD_INPUT if plan.errors else 0


def _parser() -> Parser:
    from torchturbo.generated.keys import FLAG_PREFIX

    parser = Parser(
        prog="torchturbo plan",
        usage="torchturbo plan --world_size N [--model MODEL] [OPTION ...]",
        description="What `torchturbo train` with the same options would do and need on N ranks, and every error it would "
        "meet. Nothing is launched, and no weight is read.",
        epilog=f"Every option of `torchturbo train` may follow; its own: torchturbo train --help, the engine's: "
        f"torchturbo plan {FLAG_PREFIX}help. Exit status 2 where the launch would stop at an error.",
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


def _take_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the plan's own options off a command line; all that is wrong with them is told at once."""
    own = {action.option_strings[0]: action for action in add_options(Parser())}
    values: dict[str, str] = {}
    rest: list[str] = []
    problems: list[Problem] = []
    line = iter(words)
    for word in line:
        name, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *line]
        elif name not in own:
            rest.append(word)
        elif (found := value if equals else next(line, None)) is None or (not equals and found.startswith("--")):
            problems.append(Problem(name, "", "expected a value"))
            rest += [found] if found else []
        else:
            values[name] = found
    options = argparse.Namespace(**{action.dest: action.default for action in own.values()})
    for name, read in READERS.items():
        problems += _set(options, name, values, read, own[name].dest)
    if "--world_size" not in values and not any(problem.place == "--world_size" for problem in problems):
        problems.append(
            Problem("--world_size", "", "required, but not given", "say how many ranks the launch would have")
        )
    if MODEL in values:
        given = [word for word in rest if word.partition("=")[0] == FULL_NAME]
        if given:
            problems.append(Problem(MODEL, "", f"is {FULL_NAME}, which is given too", "leave one of them out"))
        rest = [FULL_NAME, values[MODEL], *rest]
    if problems:
        fail(problems)
    return options, rest


def _set(
    options: argparse.Namespace, name: str, values: dict[str, str], read: Callable[[str], object], dest: str
) -> list[Problem]:
    if name not in values and not isinstance(getattr(options, dest), str):
        return []
    text = values[name] if name in values else str(getattr(options, dest))
    try:
        setattr(options, dest, read(text))
    except ValueError as error:
        return [Problem(name, "", f"{error}, got {text!r}")]
    return []


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise ValueError(f"expected a whole number from 1 to {MOST_RANKS:,}")
    return int(text)


def _size(text: str) -> int:
    from torchturbo.plan.sizes import read_size

    found = read_size(text)
    if found is None:
        raise ValueError("expected a size such as 80GiB or 64GB")
    return found


def _format(text: str) -> str:
    if text not in ("text", "json"):
        raise ValueError("expected one of text, json")
    return text


READERS: dict[str, Callable[[str], object]] = {
    "--world_size": _number,
    "--ranks_per_node": _number,
    "--memory": _size,
    "--format": _format,
}
