"""From a path to the text of the file, refusing what is no readable text file, and on to the reader of its format."""

from __future__ import annotations

import os
import stat
from typing import Final

from torchturbo.config.document.nodes import Node, Places, Refused, TreeBuilder
from torchturbo.errors import Problem, shorten

MAX_BYTES: Final = 10_000_000
LONGEST_NAME: Final = 4096
"""Characters of a path beyond which no file has it: an error need not show them all."""

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# UTF-32 before UTF-16: the mark of the one starts with the mark of the other.
_OTHER_MARKS: Final = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_UTF8_MARK: Final = b"\xef\xbb\xbf"
_SAVE_AS_UTF8: Final = "save the file as UTF-8"


def read_document(path: str) -> tuple[Node | None, list[Problem]]:
    """Read a file whose name ends in ``.json`` as JSON, every other one as YAML.

    Args:
        path: the file, as the user gave it; places begin with it.

    Returns:
        The root node, and every problem found. The root is None for an empty document and for one that cannot be
        read to its end. Beside problems of single keys and values there is a root: it lacks the parts named in them
        (of two equal keys the second, of an unknown tag only the tag), so that the rest can be checked too.
    """
    try:
        text = _decode(path, read_bytes(path))
    except Refused as refused:
        return None, [refused.problem]
    builder = TreeBuilder(path)
    try:
        if path.lower().endswith(".json"):
            from torchturbo.config.document.json_reader import read_json as read
        else:
            from torchturbo.config.document.yaml_reader import read_yaml as read
        read(text, builder)
    except Refused as refused:
        return None, [*builder.problems, refused.problem]
    return builder.root, builder.problems


def read_bytes(
    path: str, expected: str = "a YAML or JSON file", usual: str = "a configuration is a few kilobytes"
) -> bytes:
    """Return what a file holds, which may be of any kind, unreadable, or another one a moment later.

    Raises:
        Refused: it is no regular file, too large, or can't be read; ``expected`` and ``usual`` tell what it should be.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # before opening it: opening a pipe waits for a writer
            kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "no regular file")
            raise Refused(Problem(path, "", f"expected a file, got {kind}", f"name {expected}"))
        if status.st_size <= MAX_BYTES:
            with open(path, "rb", opener=_without_waiting) as file:
                data = file.read(MAX_BYTES + 1)  # bounded: a file may grow, and those of /proc have no size
            if len(data) <= MAX_BYTES:
                return data
    except FileNotFoundError as error:
        raise Refused(Problem(_named(path), "", "no such file", _remedy_for_missing(path))) from error
    except OSError as error:
        raise Refused(Problem(_named(path), "", f"cannot be read: {error.strerror or error}")) from error
    except ValueError as error:  # a name with NUL, or with characters that the file system's encoding lacks
        raise Refused(Problem(_named(path.replace("\0", "\\0")), "", "no file can have this name")) from error
    message = f"larger than {MAX_BYTES // 1_000_000} MB; {usual}"
    raise Refused(Problem(path, "", message, "is it the right file?"))


def _named(path: str) -> str:
    """Return a path as an error shows it: what can't be printed stands as an escape of up to ten characters."""
    return shorten(path, LONGEST_NAME if path.isprintable() else LONGEST_NAME // 10)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file so that one that became a pipe meanwhile is no wait for a writer: it reads as empty."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _remedy_for_missing(path: str) -> str:
    if path.startswith("~"):
        return "the shell left ~ as it is; write the path out"
    stem, suffix = os.path.splitext(path)
    other = stem + {".yaml": ".yml", ".yml": ".yaml"}.get(suffix, "")
    if other != stem and os.path.isfile(other):
        return f"did you mean {other}?"
    if os.path.isabs(path):
        return "check the path"
    try:
        return f"the path is taken from {os.getcwd()}"
    except OSError:
        return "the working directory no longer exists"


def _decode(path: str, data: bytes) -> str:
    """Return the text of a file in UTF-8 without its byte order mark, whatever the locale says."""
    if data.startswith(_UTF8_MARK):
        data = data[len(_UTF8_MARK) :]
    for mark, encoding in _OTHER_MARKS:
        if data.startswith(mark):
            raise Refused(Problem(path, "", f"expected UTF-8, got {encoding}", _SAVE_AS_UTF8))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        line, column = Places(before).at(len(before))
        message = f"expected UTF-8, got byte 0x{data[error.start]:02X}"
        raise Refused(Problem(f"{path}:{line}:{column}", "", message, _SAVE_AS_UTF8)) from error
