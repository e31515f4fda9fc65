"""Take TorchTurbo's options off a command line and leave the rest as it was.

argparse cannot do this: it gives a boolean option the next word whatever that is, takes ``-1e-5`` for an option,
accepts abbreviations of options it shares the line with, and stops at the first problem.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torchturbo.config.keys import Alias, Key
from torchturbo.config.layers import Layer, Reading, former_names
from torchturbo.config.scalars import Written
from torchturbo.config.specs import FALSE_WORDS, TRUE_WORDS
from torchturbo.errors import Problem, shorten
from torchturbo.generated.keys import FLAG_PREFIX, KEYS

_OPTIONS: dict[str, Key] = {key.cli: key for key in KEYS.values() if key.cli}
_FORMER: dict[str, tuple[Key, Alias]] = former_names(KEYS, "cli")
_HELP = f"{FLAG_PREFIX}help"
_STEM = FLAG_PREFIX.rstrip("_")
# Not compiled here: few command lines get to use it.
_NUMBER_LIKE = r"(?i)-(?:\.?[0-9]|inf\b|nan\b)"
_MEANT_AS_VALUE = ("on", "off", "none", "null", "enable", "enabled", "disable", "disabled")


class CommandLine(NamedTuple):
    """A command line taken apart."""

    reading: Reading
    rest: list[str]
    """Everything that is not ours, in its order."""
    wants_help: bool


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take the options apart; problems are in the reading, none is raised."""
    reading = Reading(Layer.COMMAND_LINE)
    rest: list[str] = []
    wants_help = False
    words = iter(_Words(argv))
    for word in words:
        if word == "--":  # what follows belongs to the framework, whatever it looks like
            rest += [word, *words.remaining()]
            break
        name, equals, value = word.partition("=")
        if not _is_ours(name):
            rest.append(word)
        elif name == _HELP:
            wants_help = True
        elif name in _OPTIONS:
            _read_option(reading, _OPTIONS[name], name, None, value if equals else None, words)
        elif name in _FORMER:
            key, alias = _FORMER[name]
            _read_option(reading, key, name, alias, value if equals else None, words)
        else:
            reading.problems.append(_unknown(name))
            if not equals and words.next_is_plain():
                words.skip()  # its value is no argument of the framework's
    return CommandLine(reading, rest, wants_help)


def _is_ours(name: str) -> bool:
    return name.startswith((FLAG_PREFIX, f"{_STEM}-"))


def _read_option(reading: Reading, key: Key, name: str, alias: Alias | None, value: str | None, words: _Words) -> None:
    if value is None:
        value = _boolean_word(words) if key.type == "boolean" else words.take_value()
    if value is None:
        found = f", got the option {shorten(str(words.peek()))}" if words.peek() is not None else ""
        reading.problems.append(Problem(name, "", f"expected a value ({key.expectation}){found}"))
        return
    reading.take(key, Written(value), name, spelling=name, alias=alias)


def _boolean_word(words: _Words) -> str:
    """Return the next word where it is the value, or was surely meant as one; a bare option is true."""
    following = words.peek()
    if following is None:
        return "true"
    folded = following.lower()
    meant = (*TRUE_WORDS, *FALSE_WORDS, *_MEANT_AS_VALUE)
    if folded in meant or _is_misspelt(folded) or following.startswith(("{", "[")):
        return words.skip()
    return "true"


def _is_misspelt(word: str) -> bool:
    """Return whether a word is true or false with one letter left out, added, replaced, or swapped with the next."""
    return any(_is_one_slip(word, right) for right in ("true", "false") if abs(len(word) - len(right)) <= 1)


def _is_one_slip(word: str, right: str) -> bool:
    same = next((i for i, (one, other) in enumerate(zip(word, right, strict=False)) if one != other), None)
    if same is None:
        return word != right
    rest, wanted = word[same:], right[same:]
    swapped = wanted[1:2] + wanted[:1] + wanted[2:]
    return rest == swapped or rest[1:] in (wanted, wanted[1:]) or rest == wanted[1:]


def _unknown(name: str) -> Problem:
    from torchturbo.config.names import nearest

    typed = name[len(FLAG_PREFIX) :]
    by_stem = {option[len(FLAG_PREFIX) :]: option for option in [*_OPTIONS, _HELP]}
    by_path = {_joined(key.path): option for option, key in _OPTIONS.items()}
    if option := by_path.get(_joined(typed)):  # the key as a file has it, which some options do not follow
        return Problem(shorten(name), "", "unknown option", f"did you mean {option}?")
    names = [by_stem[stem] for stem in nearest(typed, by_stem, limit=2)]
    names = names or [by_path[path] for path in nearest(_joined(typed), by_path)]
    remedy = f"did you mean {' or '.join(names)}?" if names else f"{_HELP} lists all options"
    return Problem(shorten(name), "", "unknown option", remedy)


def _joined(path: str) -> str:
    """Return a dotted path as options join words."""
    return path.lower().replace(".", "_").replace("-", "_")


class _Words:
    """The words of a command line with a look ahead."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = [str(word) for word in argv]
        self._next = 0

    def __iter__(self) -> _Words:
        return self

    def __next__(self) -> str:
        if self._next >= len(self._argv):
            raise StopIteration
        return self.skip()

    def skip(self) -> str:
        self._next += 1
        return self._argv[self._next - 1]

    def peek(self) -> str | None:
        return self._argv[self._next] if self._next < len(self._argv) else None

    def remaining(self) -> list[str]:
        rest, self._next = self._argv[self._next :], len(self._argv)
        return rest

    def next_is_plain(self) -> bool:
        word = self.peek()
        return word is not None and (not word.startswith("-") or bool(re.match(_NUMBER_LIKE, word)))

    def take_value(self) -> str | None:
        return self.skip() if self.next_is_plain() else None
