"""What holds for every launch, whatever is written in its file, its variables and its command line."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import jsonschema
import yaml

from torchturbo.cli import config as config_commands
from torchturbo.cli.main import main
from torchturbo.cli.parser import build_parser
from torchturbo.config.document import Node, Row, Scalar, read_document, yaml_reader
from torchturbo.config.document.pure_yaml import PureParser
from torchturbo.config.file import read_file
from torchturbo.config.merge import merge
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, build_from_args, load_config
from torchturbo.engine.dump import to_dict, to_json, to_yaml
from torchturbo.errors import ConfigError, Problem
from torchturbo.generated.keys import KEYS
from torchturbo.generated.validator import CHECKS, broken_rules

ROOT = Path(__file__).parents[2]
SECONDS = 2.0
"""Longest that one reading of one launch may take."""
MEGABYTES = 500
"""What the process may grow by."""
LONGEST_FOR_SLOW_READERS = 2_000
"""Bytes beyond which the oracles that are slow themselves (jsonschema, PyYAML's own parser) are left out."""
ENDINGS = (0, 1, 2)
_SCHEMA = json.loads((ROOT / "generated" / "torchturbo.schema.json").read_text(encoding="utf-8"))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)
_YAML_1_1 = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SEEN: set[str] = set()
"""Configurations that were looked at: most inputs give one of few."""
_FILE_KEYS = [path for path, key in KEYS.items() if not key.runtime]


class _Quoting(yaml.SafeDumper):
    """PyYAML, with every text in quotes: what is plain text by YAML 1.1 may be a number by 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def limit_memory() -> None:
    """Let this process grow by MEGABYTES and no more: beyond that it meets a MemoryError, which no oracle accepts."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 1_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def check(data: bytes) -> None:
    """Run one launch through every public way in; raise AssertionError, or what it raised, where something is wrong.

    Files are written to the working directory, which is the caller's own.
    """
    case = cases.parse(data)
    for name in ("t.yaml", "t.json"):
        Path(name).write_bytes(case.text)
        _document(name)
        _file(name)
    if len(case.text) <= LONGEST_FOR_SLOW_READERS:
        _pure_parser("t.yaml")
        _json_against_schema(case.text)
    _launch(case)
    with mock.patch.dict(os.environ, case.variables), mock.patch.object(config_commands, "build_parser", _parser):
        _command(["config", "validate", "t.yaml", "t.json"])
        _command(["config", "validate", "--format", "json", "t.json"])
        _command(["config", "validate", "--format", "github", "t.yaml"])
        _command(["config", "show", *case.words])
        _command(["config", "explain", *case.words])


# ---- documents and files ----


def _document(name: str) -> None:
    with _in_time():
        _, problems = read_document(name)
    _lines_of(problems)


def _file(name: str) -> None:
    """Check that an accepted file is what its keys' checks accept, and that it loads back from what it is dumped as."""
    with _in_time():
        merged = merge([read_file(name)])
    _lines_of(merged.problems)
    _lines_of(merged.warnings)
    assert all(problem.place.startswith(name) for problem in merged.problems if problem.place), merged.problems
    try:
        with _said():
            config = load_config(name)
    except ConfigError as error:
        assert merged.problems and tuple(merged.problems) == error.problems
        return
    assert not merged.problems
    _accepted(config)


def _accepted(config: EngineConfig) -> None:
    if to_yaml(config) in _SEEN:
        return
    values = {path: config.get(path) for path in _FILE_KEYS}
    assert {} == {path: said for path, value in values.items() if (said := CHECKS[path](value))}
    assert not list(broken_rules(values))
    assert [] == [error.message for error in _VALIDATOR.iter_errors(to_dict(config))]
    for name, text in (("again.yaml", to_yaml(config)), ("again.json", to_json(config))):
        Path(name).write_text(text, encoding="utf-8")
        with _said():
            again = load_config(name)
        assert config == again, name
        assert [type(value) for value in values.values()] == [type(again.get(path)) for path in _FILE_KEYS]
    assert json.loads(to_json(config)) == yaml.load(to_yaml(config), _YAML_1_1)
    if len(_SEEN) < 10_000:
        _SEEN.add(to_yaml(config))


def _pure_parser(name: str) -> None:
    """Read a file with PyYAML's own parser, which stands in where libyaml is missing."""
    root, problems = read_document(name)
    with mock.patch.object(yaml_reader, "PARSER", PureParser), _in_time(5 * SECONDS):
        other_root, other_problems = read_document(name)
    _lines_of(other_problems)
    assert bool(problems) == bool(other_problems), (problems, other_problems)
    if not problems:
        assert _plain(root) == _plain(other_root)


def _plain(node: Node | None) -> Any:
    if isinstance(node, Scalar):
        return node.text, node.quoted
    if node is None:
        return None
    if isinstance(node, Row):
        return [_plain(item) for item in node.items]
    return {_plain(name): _plain(child) for name, child in node.items}


def _json_against_schema(text: bytes) -> None:
    """Check that JSON has its errors where jsonschema finds them, and that the same data in YAML has the same ones."""
    try:
        tree = json.loads(text.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        return
    if tree is None or not _comparable(tree):
        return
    expected = _schema_paths(tree)
    found = {problem.key for problem in read_file("t.json").problems}
    assert expected == found, (expected, found)
    Path("same.yaml").write_text(yaml.dump(tree, Dumper=_Quoting, allow_unicode=True), encoding="utf-8")
    assert expected == {problem.key for problem in read_file("same.yaml").problems}
    if not expected:
        with _said():
            merged = [merge([read_file(name)]) for name in ("t.json", "same.yaml")]
        assert merged[0].values == merged[1].values


def _schema_paths(tree: Any) -> set[str]:
    paths = set()
    for error in _VALIDATOR.iter_errors(tree):
        where = [str(part) for part in error.absolute_path]
        if error.validator == "additionalProperties":
            paths |= {".".join([*where, name]) for name in error.instance.keys() - error.schema["properties"].keys()}
        else:
            paths.add(".".join(where))
    return paths


def _comparable(tree: Any, depth: int = 0) -> bool:
    """Return whether the two libraries can say anything of a tree: JSON's numbers have no end, Python's floats do.

    Long names are shortened in our errors, and a surrogate's half is no character of YAML.
    """
    if depth > 20:
        return False
    if isinstance(tree, dict):
        return all(len(name) < 40 and "<<" != name and _comparable(name) for name in tree) and all(
            _comparable(child, depth + 1) for child in tree.values()
        )
    if isinstance(tree, list):
        return all(_comparable(child, depth + 1) for child in tree)
    if isinstance(tree, float):
        return math.isfinite(tree)
    if isinstance(tree, int):
        return len(str(tree)) < 300
    return not isinstance(tree, str) or not any("\ud800" <= character <= "\udfff" for character in tree)


def _no_constant(word: str) -> Any:
    raise ValueError(word)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate")
    return table


# ---- launches and commands ----


def _launch(case: cases.Case) -> None:
    """Check that a launch gives a configuration, or problems that are printed one a line."""
    printed = io.StringIO()
    try:
        with _in_time(), _said(printed):
            args, rest = parse_torchturbo_args(case.words)
            config = build_from_args(args, environ=case.variables)
    except ConfigError as error:
        assert error.problems
        _lines_of(error.problems)
        lines = printed.getvalue().splitlines()
        assert [f"error: {problem}" for problem in error.problems] == [line for line in lines if line[:6] == "error:"]
        return
    except SystemExit as end:
        assert not end.code and any(word.startswith("--tt_help") for word in case.words), end.code
        return
    ended = case.words.index("--") if "--" in case.words and "--" in rest else len(case.words)
    after = case.words[ended:]
    assert list(after) == rest[len(rest) - len(after) :]
    assert not any(word.startswith(("--tt_", "--tt-")) for word in rest[: len(rest) - len(after)])
    _accepted(config)


@functools.cache
def _made_parser() -> Any:
    return build_parser(KEYS.values(), config_commands.HELP_FLAG)


def _parser(*_: Any) -> Any:
    """Return the command's parser, made once: making it takes longer than all else."""
    return _made_parser()


def _command(words: list[str]) -> None:
    """Check that a command ends with a status of its own and tells nothing of its insides."""
    out, err = io.StringIO(), io.StringIO()
    with _in_time(), _said(err, out):
        try:
            status = main(words)
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else 0
    assert status in ENDINGS, status
    text = out.getvalue() + err.getvalue()
    assert "Traceback (most recent" not in text and "to see where it happened" not in text, text[-2000:]
    assert status != 2 or err.getvalue().startswith(("error: ", "torchturbo")), err.getvalue()
    text.encode("utf-8", "backslashreplace")


def _lines_of(problems: list[Problem] | tuple[Problem, ...]) -> None:
    for problem in problems:
        line = str(problem)
        assert line.isprintable() and line.strip(), repr(line)
        assert len(line) < 5_000, len(line)  # a path may be 4,096


@contextlib.contextmanager
def _in_time(seconds: float = SECONDS) -> Iterator[None]:
    started = time.process_time()
    yield
    took = time.process_time() - started
    assert took < seconds, f"{took:.1f} s"


@contextlib.contextmanager
def _said(err: io.StringIO | None = None, out: io.StringIO | None = None) -> Iterator[None]:
    """Keep what is printed from the terminal; the logger's handler writes where it was set up, so both go."""
    import logging

    logging.getLogger("torchturbo").handlers.clear()
    with contextlib.redirect_stderr(err or io.StringIO()), contextlib.redirect_stdout(out or io.StringIO()):
        yield
    logging.getLogger("torchturbo").handlers.clear()
    sys.stderr.flush()
