"""Read one scalar by its key's type, the same way from a file, a variable and an option."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torchturbo.config.keys import Key
from torchturbo.config.specs import FALSE_WORDS, TRUE_WORDS
from torchturbo.errors import shorten

# The YAML 1.2 core schema, less its readings that people do not mean: leading zeros and, in the class of digits, ASCII only.
NULLS = ("null", "Null", "NULL")
FILE_NULLS = (*NULLS, "~", "")
FILE_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Texts, which `re` compiles where a value first needs one: most launches need the first alone.
_INTEGER = r"[-+]?(?:0|[1-9][0-9]*)"
_BASED = r"0o[0-7]+|0x[0-9a-fA-F]+"
_NUMBER = r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_NOT_FINITE_WORDS = r"(?i)[-+]?(?:inf|infinity|nan)"
LONGEST_NUMBER = 400
"""Characters; Python itself refuses to read integers of some thousand digits."""


class Written(NamedTuple):
    """A scalar as somebody wrote it."""

    text: str
    quoted: bool = False
    in_file: bool = False
    """Whether YAML's own words count (``~``, ``.inf``) or the ten boolean words of a command line."""


def read(key: Key, written: Written) -> Any:
    """Return the value, or one of another type where the text is no value of the key's type.

    It reports nothing: the key's check says what was expected, and :func:`found` what was written.
    """
    text = written.text
    if written.quoted or key.type == "array":
        return text
    if text in (FILE_NULLS if written.in_file else NULLS):
        return None
    if key.type == "boolean":
        known = FILE_BOOLEANS.get(text) if written.in_file else _word(text)
        if known is not None:
            return known
    elif key.type in ("integer", "number"):
        value = number(text)
        if value is None and not written.in_file and re.fullmatch(_NOT_FINITE_WORDS, text):
            value = float(text)
        if value is not None:
            return _narrowed(value, key)
    elif key.python:
        return text.strip().upper()
    else:
        return text
    return _guess(text) if written.in_file else text


def number(text: str) -> int | float | None:
    """Return the number that a text is by YAML 1.2's core schema, or None."""
    if len(text) > LONGEST_NUMBER:
        return None
    if re.fullmatch(_INTEGER, text):
        return int(text)
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if re.fullmatch(_BASED, text):
        return int(text, 0)
    if re.fullmatch(_NOT_FINITE, text):
        return float(text.replace(".", "").lower())
    return None


def normal(key: Key, value: Any) -> Any:
    """Return a checked value in its key's own type: 1.0 is the integer 1, 2 the number 2.0."""
    return _narrowed(value, key) if key.type in ("integer", "number") else value


def found(written: Written, value: Any) -> str:
    """Return how an error shows what was written: ``string "four"``, ``integer 0``, ``"fp8"``."""
    import json  # only where something is wrong

    text = shorten(written.text)
    quoted = json.dumps(text, ensure_ascii=False)
    if not written.in_file:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        return quoted if text else "nothing"
    if written.quoted or isinstance(value, str):
        return f"string {quoted}"
    return "null" if value is None else f"{json_type(value)} {text}"


def json_type(value: Any) -> str:
    """Return the JSON type of a Python value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, (list, tuple)) else type(value).__name__)


def remedy(key: Key, written: Written) -> str:
    """Return what to write instead of a value that the key's check refuses, or nothing where that is not known."""
    text = written.text.strip()
    if written.quoted and key.nullable and text in NULLS:
        return "remove the quotes"
    if key.nullable and text.lower() in ("none", "~", ""):
        return "did you mean null?"
    if key.type == "boolean":
        return _boolean_remedy(text, written)
    if not key.nullable and text.lower() in ("null", "none", "~", ""):
        return "leave it out for its default"
    if key.type in ("integer", "number"):
        return _number_remedy(text, written, key)
    if key.choices:
        from torchturbo.config.names import did_you_mean

        return did_you_mean(text, key.choices)
    if key.type == "array" and text.endswith(","):
        return f"give {key.cli} once for each"
    return ""


def _boolean_remedy(text: str, written: Written) -> str:
    if written.quoted and text in FILE_BOOLEANS:
        return "remove the quotes"
    if text in FILE_NULLS:
        return "write true or false, or leave it out for its default"
    if text.startswith(("{", "[")):
        return "write true or false; a whole section belongs in a file"
    word = text.lower()
    if word in (*TRUE_WORDS, "on", "enable", "enabled"):
        return "write true"
    if word in (*FALSE_WORDS, "off", "none", "disable", "disabled"):
        return "write false"
    from torchturbo.config.names import did_you_mean

    return did_you_mean(text, ("true", "false")) or "write true or false"


def _number_remedy(text: str, written: Written, key: Key) -> str:
    value = number(text)
    if value is not None:
        if written.quoted:
            return "remove the quotes"
        if text != written.text:
            return "write it without blanks"
        broken = key.type == "integer" and isinstance(value, float) and not value.is_integer()
        return "write a whole number" if broken else ""
    plain = text.replace("_", "").replace(",", "")
    bare = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", plain)
    if bare != text and number(bare) is not None:
        octal = f", or 0o{bare} for an octal number" if bare != plain and re.fullmatch("[0-7]+", bare) else ""
        return f"write {bare}{octal}"
    try:
        int(text)
    except ValueError:
        return ""
    return "" if text.isascii() else "write the digits 0 to 9"


def _word(text: str) -> bool | None:
    word = text.lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _narrowed(value: float, key: Key) -> float:
    if key.type == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if key.type == "number" and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    return value


def _guess(text: str) -> Any:
    """Return what YAML's core schema makes of a plain text that is no value of its key's type."""
    if text in FILE_BOOLEANS:
        return FILE_BOOLEANS[text]
    value = number(text)
    return text if value is None else value
