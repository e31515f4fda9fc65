"""LLaMA-Factory's arguments as the user wrote them: a file with overrides, or flags; each with its place.

LLaMA-Factory looks for a file in the first word alone, can't read JSON files, and takes no flags beside a file
(https://github.com/hiyouga/LlamaFactory/issues/4399, /6075, /10316). Here all of these work; values are read by
OmegaConf, as it reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torchturbo.config.document import Node, Row, Scalar, Table, read_document
from torchturbo.config.specs import FALSE_WORDS, TRUE_WORDS
from torchturbo.errors import Problem, shorten
from torchturbo.generated.keys import FLAG_PREFIX

FILES = (".yaml", ".yml", ".json")
RANK_FLAGS = ("--local_rank", "--local-rank")
"""What an older launcher puts before the script's own words; torchrun gives the same as a variable."""
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
NULLS = ("", "~", "null", "Null", "NULL")
FILLED = "${"
NESTED = re.compile(r"\$\{[^}]*\$\{")
SECRET = re.compile(r"(?i)token|secret|passw|api_?key")
"""Names of arguments whose values no error shows, misspelt ones too."""
NUMBER = re.compile(r"[+-]?(\d+(?P<fraction>\.\d*)?|\.\d+)(?P<power>[eE][+-]?\d+)?")


class Said(NamedTuple):
    """One argument that the user wrote."""

    value: Any
    place: str
    """``train.yaml:3:7: bf16``, ``bf16=true`` or ``--bf16``."""
    filled: bool = False
    """Whether ``${...}`` was filled in, which may be a variable that nobody else is to see."""

    def told(self, form: str = "{}") -> str:
        """Return the value in a form, as an error may show it."""
        return "its value" if self.filled else form.format(shorten(str(self.value)))


class Arguments(NamedTuple):
    """LLaMA-Factory's side of a command line."""

    said: dict[str, Said]
    """By LLaMA-Factory's name."""
    for_framework: dict[str, Any] | list[str]
    """What ``run_exp`` takes: the values where there is a file, the flags where there is none."""
    problems: list[Problem]


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read LLaMA-Factory's words: what is wrong with them is in the result, none of it is raised."""
    words = [word for word in _without_rank(words) if word != "--"]
    at = _file_at(words)
    if at is None:
        return _read_flags(words)
    if find_spec("omegaconf") is None:
        return _read_plainly(words[at], [*words[:at], *words[at + 1 :]])
    tree, places, problems = _read_file(words[at])
    for place, override in _overrides([*words[:at], *words[at + 1 :]], problems):
        tree = _merged(tree, override, place, problems)
        places[override.partition("=")[0].partition(".")[0]] = place
    values, filled = _resolved(tree, places, words[at], problems)
    said = {name: Said(value, places.get(name, words[at]), name in filled) for name, value in values.items()}
    return Arguments(said, values, problems)


def _without_rank(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        name, _, rank = word.partition("=")
        if name not in RANK_FLAGS or rank != os.environ.get("LOCAL_RANK", rank):
            yield word


def _file_at(words: Sequence[str]) -> int | None:
    """Return the index of the file's word: one that is no flag, and no flag's value."""
    for at, word in enumerate(words):
        after_flag = at > 0 and words[at - 1].startswith("-") and "=" not in words[at - 1]
        if word.lower().endswith(FILES) and not word.startswith("-") and "=" not in word and not after_flag:
            return at
    return None


# ---- a file and overrides ----


def _read_file(path: str) -> tuple[Any, dict[str, str], list[Problem]]:
    """Return a file as OmegaConf reads it, and the place of each of its keys."""
    from omegaconf import OmegaConf

    root, problems = _read_root(path)
    if root is not None and not problems:
        places = {name.text: _place(path, name, node) for name, node in root.items}
        try:
            if path.lower().endswith(".json"):
                return OmegaConf.create(json.loads(Path(path).read_text(encoding="utf-8-sig"))), places, problems
            return OmegaConf.load(path), places, problems
        except Exception as error:  # where OmegaConf's YAML 1.1 and our 1.2 part
            problems.append(Problem(path, "", _first_line(error)))
    return OmegaConf.create({}), {}, problems


def _read_root(path: str) -> tuple[Table | None, list[Problem]]:
    root, problems = read_document(path)
    if root is None or isinstance(root, Table):
        return root, problems
    return None, [*problems, Problem(f"{path}:{root.line}:{root.column}", "", "expected a mapping of arguments")]


def _place(path: str, name: Scalar, node: Node) -> str:
    return f"{path}:{node.line}:{node.column}: {name.text}"


def _merged(tree: Any, override: str, place: str, problems: list[Problem]) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.merge(tree, OmegaConf.from_dotlist([override]))
    except Exception as error:  # OmegaConf's and PyYAML's own
        problems.append(Problem(place, "", _first_line(error)))
        return tree


def _resolved(
    tree: Any, places: Mapping[str, str], path: str, problems: list[Problem]
) -> tuple[dict[str, Any], set[str]]:
    """Return the values with their ``${...}`` filled in, each key that can be, and the keys that had any."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values, filled = {}, set()
    everything: Any = OmegaConf.to_container(tree, resolve=False)
    for name, written in everything.items():
        raw = str(written)
        if FILLED in raw:
            filled.add(str(name))
        try:
            value = tree[name]
            values[str(name)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            # What is inside another ${...} is filled in by then, and stands in OmegaConf's message.
            message = "a ${...} in its value can't be filled in" if NESTED.search(raw) else _first_line(error)
            problems.append(Problem(places.get(str(name), path), "", message))
    return values, filled


def _overrides(words: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """Return place and ``key=value`` of each word beside a file, written so or as ``--key value``."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            if OVERRIDE.match(word):
                yield _short(word), word
            else:
                problems.append(_stray(word))
        elif equals:
            yield word.partition("=")[0], _underscored(word)
        else:
            value = "true"
            if rest and not rest[0].startswith("--") and not OVERRIDE.match(rest[0]):
                value = rest.pop(0)
            yield word, f"{_underscored(word)}={value}"


def _stray(word: str) -> Problem:
    if word == "train":
        return Problem(word, "", "unexpected word", "leave it out: this command only trains")
    if word.lower().endswith(FILES):
        return Problem(word, "", "a second file", "name one; a TorchTurbo configuration has an option of its own")
    return Problem(word, "", "expected key=value", "quote values with blanks: 'run_name=my run'")


# ---- a file without OmegaConf ----


def _read_plainly(path: str, others: Sequence[str]) -> Arguments:
    """Read a file and overrides where OmegaConf is not installed: nothing can run, but what is wrong can be told."""
    root, problems = _read_root(path)
    items = root.items if root is not None and not problems else []
    said = {name.text: Said(_plain(node), _place(path, name, node)) for name, node in items}
    for place, override in _overrides(others, problems):
        name, _, text = override.partition("=")
        if items and "." not in name:
            said[name] = Said(_scalar(text), place)
    if FILLED in str(said):  # what it stands for is not known
        said = {}
    return Arguments(said, {name: one.value for name, one in said.items()}, problems)


def _plain(node: Node) -> Any:
    if isinstance(node, Table):
        return {name.text: _plain(value) for name, value in node.items}
    if isinstance(node, Row):
        return [_plain(value) for value in node.items]
    return node.text if node.quoted else _scalar(node.text)


def _scalar(text: str) -> Any:
    return None if text in NULLS else _value([text])


# ---- flags ----


def _read_flags(words: Sequence[str]) -> Arguments:
    """Read flags alone, whose values LLaMA-Factory reads by their types; what is known by name is read here too."""
    said: dict[str, Said] = {}
    problems: list[Problem] = []
    flag, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            if flag:
                values.append(word)
            else:
                problems.append(_stray(word))
            continue
        if flag:
            said[_underscored(flag)] = Said(_value(values), flag)
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
    if not words:
        message = "no arguments of LLaMA-Factory"
        problems.append(Problem("", "", message, "name its file: torchturbo llamafactory train.yaml"))
    return Arguments(said, list(words), problems)


def _value(words: Sequence[str]) -> Any:
    if len(words) != 1:
        return list(words) if words else True
    word = words[0]
    folded = word.lower()
    if folded in TRUE_WORDS + FALSE_WORDS and not word.isdigit():
        return folded in TRUE_WORDS
    if number := NUMBER.fullmatch(word):
        return float(word) if number["fraction"] or number["power"] or "." in word else int(word)
    return word


# ---- words ----


def _underscored(word: str) -> str:
    """Return a flag's word as LLaMA-Factory names the argument, its value untouched."""
    name, equals, value = word.removeprefix("--").partition("=")
    return name.replace("-", "_") + equals + value


def _short(word: str) -> str:
    name, _, value = word.partition("=")
    return f"{name}={'...' if SECRET.search(name) else shorten(value)}"


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def is_ours(name: str) -> bool:
    """Return whether an argument's name is one of TorchTurbo's options without its dashes."""
    return f"--{name}".startswith(FLAG_PREFIX)
