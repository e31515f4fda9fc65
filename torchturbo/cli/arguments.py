"""An argument parser that tells what is wrong in one line, with the nearest name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from torchturbo.config.names import did_you_mean, nearest
from torchturbo.errors import BAD_INPUT, Problem, print_errors, shorten
from torchturbo.generated.keys import FLAG_PREFIX


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line each, with the nearest name, as all of TorchTurbo's are."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown arguments here: a sub-command's parser knows its options, the whole command's does not."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            self._leave(
                Problem(shorten(word), "", f"not an argument of `{self.prog}`", _nearest(word, options))
                for word in [word for word in unknown if word.startswith("-")] or unknown  # not also their values
            )
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave with status 2."""
        if choice := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            known = [word.strip(" '") for word in choice[3].split(",")]
            expected = f"expected one of {', '.join(known)}, got {shorten(choice[2])!r}"
            self._leave([Problem(choice[1], "", expected, did_you_mean(choice[2], known))])
        named = re.match(r"argument (\S+): ", message)
        self._leave(
            [Problem(named[1] if named else "", "", shorten(message[named.end() :] if named else message, 300))]
        )

    def _leave(self, problems: Iterable[Problem]) -> NoReturn:
        print_errors(
            str(problem._replace(remedy=problem.remedy or f"see `{self.prog} --help`")) for problem in problems
        )
        sys.exit(BAD_INPUT)


def _nearest(word: str, options: list[str]) -> str:
    """Return the question for a misspelt option; what all of ours begin with makes none of them like another."""
    name = word.partition("=")[0]
    prefix = FLAG_PREFIX if name.startswith(FLAG_PREFIX) else "--" if name.startswith("--") else ""
    by_stem = {option.removeprefix(prefix): option for option in options if option.startswith(prefix)}
    found = nearest(name.removeprefix(prefix), by_stem)
    return f"did you mean {by_stem[found[0]]}?" if found else ""
