"""Reading training files: each row of text, JSON or JSONL becomes one of three kinds, and every bad row is named.

Kinds: *chat* (messages that go through the chat template), *pair* (a prompt and its completion, as plain text) and
*text* (all of it is trained on).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from torchturbo.errors import Problem

SUFFIXES = (".jsonl", ".json", ".txt")
ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_PROBLEMS = 20
"""Problems shown for one file; the rest is counted."""
EXPECTED = "messages, or instruction and output, or prompt and completion, or text"


class RowError(ValueError):
    """What is wrong with one row: found and expected."""


@dataclass(frozen=True)
class Row:
    """One training example, as written."""

    place: str
    """``file:line``, or ``file: row N`` inside a JSON list."""
    kind: Literal["chat", "pair", "text"]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt: str = ""
    text: str = ""
    """The completion of a pair, or the whole of a text."""


@dataclass(frozen=True)
class SourceFile:
    """One file that was read, for the record of the run."""

    path: Path
    sha256: str
    rows: int


def read_files(paths: Sequence[str], place: str) -> tuple[list[Row], list[SourceFile], list[Problem]]:
    """Read training files in order; ``place`` is the option that named them."""
    rows: list[Row] = []
    files: list[SourceFile] = []
    problems: list[Problem] = []
    for name in paths:
        path = Path(name).expanduser()
        if problem := path_problem(path, place):
            problems.append(problem)
            continue
        try:
            data = path.read_bytes()
            found, bad = _read(path, data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            problems.append(Problem(str(path), "", f"is not UTF-8 at byte {error.start}", "save it as UTF-8"))
            continue
        except OSError as error:
            problems.append(Problem(place, "", f"{path} can't be read: {error.strerror or error}"))
            continue
        if not found and not bad:
            bad = [Problem(str(path), "", "holds no rows")]
        problems += _limited(bad, path)
        rows += found
        files.append(SourceFile(path, sha256(data).hexdigest(), len(found)))
    return rows, files, problems


def path_problem(path: Path, place: str) -> Problem | None:
    """Return what keeps a path from being a training file, without reading it."""
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        remedy = f"give files: {', '.join(inside[:4])}{', …' if len(inside) > 4 else ''}" if inside else ""
        return Problem(place, "", f"{path} is a folder, expected a file", remedy)
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else None
        near = difflib.get_close_matches(path.name, [file.name for file in folder.iterdir()], n=1) if folder else []
        remedy = f"did you mean {path.with_name(near[0])}?" if near else ""
        return Problem(place, "", f"there is no file {path}", remedy)
    if not path.is_file():  # a pipe would be waited for
        return Problem(place, "", f"{path} is no regular file")
    if path.suffix not in SUFFIXES:
        return Problem(place, "", f"{path}: expected one of {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'!r}")
    return None


def _limited(problems: list[Problem], path: Path) -> list[Problem]:
    if len(problems) <= MOST_PROBLEMS:
        return problems
    more = len(problems) - MOST_PROBLEMS
    return [*problems[:MOST_PROBLEMS], Problem(str(path), "", f"{more} more rows like these ({len(problems)} in all)")]


def _read(path: Path, text: str) -> tuple[list[Row], list[Problem]]:
    if path.suffix == ".txt":
        return [Row(place, "text", text=part) for place, part in _documents(path, text)], []
    if path.suffix == ".json" and text.lstrip().startswith("["):
        pairs: list[tuple[str, Any]] = []
        try:
            pairs = [(f"{path}: row {number}", value) for number, value in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as error:
            return [], [_json_problem(f"{path}", error)]
        return _rows(pairs)
    return _read_lines(path, text)


def _documents(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of a text, or its lines where it has no blank line between them."""
    lines = text.split("\n")
    by_line = not any(not line.strip() for line in text.strip().split("\n"))
    part: list[str] = []
    start = 1
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            if not part:
                start = number
            part.append(line.rstrip("\r"))
        if part and (by_line or not line.strip()):
            yield f"{path}:{start}", "\n".join(part)
            part = []


def _read_lines(path: Path, text: str) -> tuple[list[Row], list[Problem]]:
    pairs: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            pairs.append((f"{path}:{number}", json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(_json_problem(f"{path}:{number}", error))
    rows, bad = _rows(pairs)
    return rows, sorted(problems + bad, key=lambda problem: int(problem.place.rsplit(":", 1)[1]))


def _json_problem(place: str, error: Exception) -> Problem:
    if isinstance(error, json.JSONDecodeError):
        where = f"line {error.lineno} " if error.lineno > 1 else ""
        return Problem(place, "", f"no JSON: {error.msg} at {where}column {error.colno}")
    return Problem(place, "", f"no JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}")


def _rows(pairs: list[tuple[str, Any]]) -> tuple[list[Row], list[Problem]]:
    rows: list[Row] = []
    problems: list[Problem] = []
    for place, value in pairs:
        try:
            _refuse_half_characters(value)
            rows.append(parse_row(place, value))
        except RowError as error:
            problems.append(Problem(place, "", str(error)))
    return rows, problems


def _refuse_half_characters(value: Any) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and no tokenizer can read; raises :class:`RowError`."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise RowError(f"{escape} is half of a surrogate pair and stands for no character") from error


def parse_row(place: str, value: Any) -> Row:
    """Return a row by what keys it has; raises :class:`RowError` with what was found and expected."""
    if not isinstance(value, dict):
        raise RowError(f"expected an object with {EXPECTED}, got {_kind(value)}")
    if "messages" in value:
        tools = value.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise RowError(f"tools: expected a list, got {_kind(tools)}")
        return Row(place, "chat", messages=_messages(value["messages"]), tools=tools)
    if "instruction" in value:
        return Row(place, "chat", messages=_instruction(value))
    if "prompt" in value or "completion" in value:
        return _pair(place, value)
    if "text" in value:
        return Row(place, "text", text=_string(value, "text"))
    found = ", ".join(map(str, list(value)[:6])) or "none"
    remedy = "; rename conversations to messages, with role and content" if "conversations" in value else ""
    raise RowError(f"expected {EXPECTED}; found the keys {found}{remedy}")


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(f"messages: expected a list of messages, got {_kind(value)}")
    for number, message in enumerate(value, 1):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RowError(f"{where}: expected an object with role and content, got {_kind(message)}")
        if message.get("role") not in ROLES:
            raise RowError(f"{where}.role: expected one of {', '.join(ROLES)}, got {message.get('role')!r}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise RowError(f"{where}.content: expected text, got {_kind(message.get('content'))}")
    if all(message["role"] != "assistant" for message in value):
        raise RowError("messages: no message of the role assistant, so there is nothing to train on")
    return value


def _instruction(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an instruction row as messages; ``input`` follows the instruction on a line of its own."""
    messages = []
    if system := _string(value, "system", optional=True):
        messages.append({"role": "system", "content": system})
    history = value.get("history") or []
    if not isinstance(history, list):
        raise RowError(f"history: expected a list of pairs, got {_kind(history)}")
    for number, turn in enumerate(history, 1):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise RowError(f"history[{number}]: expected a pair of question and answer, got {_kind(turn)}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = [_string(value, "instruction"), _string(value, "input", optional=True)]
    messages.append({"role": "user", "content": "\n".join(part for part in question if part)})
    messages.append({"role": "assistant", "content": _string(value, "output")})
    return messages


def _pair(place: str, value: dict[str, Any]) -> Row:
    """Return a prompt and its completion; both may be lists of messages, which then are one conversation."""
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return Row(place, "chat", messages=_messages([*prompt, *completion]), tools=value.get("tools"))
    return Row(place, "pair", prompt=_string(value, "prompt"), text=_string(value, "completion"))


def _string(value: dict[str, Any], key: str, *, optional: bool = False) -> str:
    found = value.get(key)
    if found is None and optional:
        return ""
    if not isinstance(found, str):
        raise RowError(f"{key}: expected text, got {'nothing' if key not in value else _kind(found)}")
    return found


def _kind(value: Any) -> str:
    """Return a value as a short description: its JSON type, and what it is where that is short."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    if isinstance(value, list) and not value:
        return "an empty list"
    name = names.get(type(value), "a number")
    return f"{name} {value!r}" if isinstance(value, str | int | float) and len(repr(value)) < 30 else name
