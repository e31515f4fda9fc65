"""One launch as bytes, which a fuzzer can change and a person can read: a file's text, words, variables.

A corpus file holds the text of the configuration file, and after a line ``%% words`` one word a line, and after a line
``%% variables`` one ``NAME=value`` a line. Bytes that are no UTF-8 stay what they are, in the file and, escaped as
the operating system does it, in words and variables.
"""

from __future__ import annotations

from typing import NamedTuple

WORDS, VARIABLES = b"\n%% words\n", b"\n%% variables\n"


class Case(NamedTuple):
    """One launch."""

    text: bytes
    words: tuple[str, ...]
    variables: dict[str, str]


def parse(data: bytes) -> Case:
    """Return the launch that some bytes stand for; any bytes stand for one."""
    data, _, variables = data.partition(VARIABLES)
    text, _, words = data.partition(WORDS)
    # A process gets its words and variables as C strings, which end at a NUL.
    lines = [line.replace(b"\0", b"") for line in words.split(b"\n")] if words else []
    pairs = [line.replace(b"\0", b"").partition(b"=") for line in variables.split(b"\n") if not line.startswith(b"=")]
    return Case(
        text, tuple(map(_system, lines)), {_system(name): _system(value) for name, sign, value in pairs if sign}
    )


def build(text: str | bytes = b"", words: tuple[str, ...] = (), variables: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a launch."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    if words:
        data += WORDS + "\n".join(words).encode("utf-8", "surrogateescape")
    if variables:
        lines = [f"{name}={value}" for name, value in variables.items()]
        data += VARIABLES + "\n".join(lines).encode("utf-8", "surrogateescape")
    return data


def _system(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
