"""JSON text into nodes with places: RFC 8259 to the letter, on a stack of its own instead of the call stack."""

from __future__ import annotations

import re
from json import JSONDecodeError, JSONDecoder
from typing import Final

from torchturbo.config.document.nodes import Places, Refused, Row, Scalar, Table, TreeBuilder, escaped
from torchturbo.errors import shorten

_BLANKS: Final = " \t\n\r"
_TOKEN_START: Final = re.compile(f"[{_BLANKS}]*")
_LITERAL: Final = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null)(?![\w.+-])")
_WORD: Final = re.compile(r"[\w.+-]+")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
# Used for one string at a time: only that part of the standard library's decoder neither nests nor guesses.
_read_string = JSONDecoder().raw_decode

# What comes next. In the two "first" states the mapping or list may also end at once.
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _COMMA, _END = range(7)
_EXPECTED: Final = {
    _VALUE: "a value",
    _FIRST_VALUE: "a value or ']'",
    _KEY: "a key in double quotes",
    _FIRST_KEY: "a key in double quotes or '}'",
    _COLON: "':'",
    _END: "the end of the file",
}
_CLOSING: Final = {"{": "}", "[": "]"}
_REMEDIES: Final = {
    "/": "JSON has no comments; remove it, or use a .yaml file",
    "#": "JSON has no comments; remove it, or use a .yaml file",
    "'": "use double quotes",
    "NaN": "JSON has no such number",
    "Infinity": "JSON has no such number",
    "-Infinity": "JSON has no such number",
    "True": "write true",
    "False": "write false",
    "None": "write null",
}
_STRING_ERRORS: Final = (
    ("Unterminated", "a quote that is never closed", ""),
    ("control character", "a line break, tab or other control character in a string", "close the quote, or write \\n"),
    ("\\u", "an escape that stands for no character", "write \\u and four digits, or the character itself"),
    ("escape", "an unknown escape", "write \\\\ for a backslash"),
)


def read_json(text: str, builder: TreeBuilder) -> None:
    """Hand the nodes of a JSON document to the builder; blank text is an empty document.

    Args:
        text: the whole file, without a byte order mark.
        builder: gets the nodes and the problems of single keys and values.

    Raises:
        Refused: the text is no JSON from some place on, or it exceeds a limit of the builder.
    """
    if text.strip(_BLANKS):
        _Reader(text, builder).read()


class _Reader:
    def __init__(self, text: str, builder: TreeBuilder) -> None:
        self._text = text
        self._builder = builder
        self._line_and_column = Places(text).at
        self._open: list[int] = []  # positions of the brackets not yet closed
        self._position = 0

    def read(self) -> None:
        """Read token by token; the state says which token may come next."""
        text = self._text
        state = _VALUE
        while True:
            blanks = _TOKEN_START.match(text, self._position)
            self._position = position = blanks.end() if blanks else 0
            character = text[position : position + 1]
            if not character and state == _END:
                return
            if self._may_close(state, character):
                state = self._close()
            elif state in (_VALUE, _FIRST_VALUE):
                state = self._value(state, character)
            elif state in (_KEY, _FIRST_KEY) and character == '"':
                self._string()
                state = _COLON
            elif state == _COLON and character == ":":
                self._position += 1
                state = _VALUE
            elif state == _COMMA and character == ",":
                self._position += 1
                state = _KEY if self._bracket() == "{" else _VALUE
            else:
                raise self._unexpected(state, character)

    def _value(self, state: int, character: str) -> int:
        line, column = self._line_and_column(self._position)
        if character in ("{", "["):
            is_table = character == "{"
            self._builder.open(Table(line, column) if is_table else Row(line, column))
            self._open.append(self._position)
            self._position += 1
            return _FIRST_KEY if is_table else _FIRST_VALUE
        if character == '"':
            self._string()
        elif literal := _LITERAL.match(self._text, self._position):
            self._builder.scalar(Scalar(literal.group(), False, line, column))
            self._position = literal.end()
        else:
            raise self._unexpected(state, character)
        return self._after_value()

    def _string(self) -> None:
        line, column = self._line_and_column(self._position)
        try:
            value, end = _read_string(self._text, self._position)
        except JSONDecodeError as error:
            message, remedy = next((m, r) for words, m, r in _STRING_ERRORS if words in error.msg)
            raise self._builder.refuse(*self._line_and_column(error.pos), message, remedy) from error
        if not value.isascii() and _SURROGATE.search(value):
            message = "an escape that stands for no character (half of a surrogate pair)"
            raise self._builder.refuse(line, column, message, "write the character itself")
        self._position = end
        self._builder.scalar(Scalar(value, True, line, column))

    def _bracket(self) -> str:
        """Return the innermost open bracket, or nothing."""
        return self._text[self._open[-1]] if self._open else ""

    def _may_close(self, state: int, character: str) -> bool:
        return state in (_FIRST_KEY, _FIRST_VALUE, _COMMA) and character == self._closing()

    def _closing(self) -> str:
        return _CLOSING.get(self._bracket(), "")

    def _close(self) -> int:
        self._builder.close()
        self._open.pop()
        self._position += 1
        return self._after_value()

    def _after_value(self) -> int:
        return _COMMA if self._open else _END

    def _unexpected(self, state: int, character: str) -> Refused:
        refuse = self._builder.refuse
        if not character:
            bracket = self._line_and_column(self._open[-1])
            return refuse(*bracket, f"'{self._bracket()}' is never closed")
        place = self._line_and_column(self._position)
        before = self._text[: self._position].rstrip(_BLANKS)
        if before.endswith(",") and character == self._closing():
            return refuse(*self._line_and_column(len(before) - 1), f"a comma before '{character}'", "remove the comma")
        word = _WORD.match(self._text, self._position)
        found = word.group() if word else character
        shown = repr(shorten(found)) if found.isprintable() else escaped(character)
        expected = f"',' or '{self._closing()}'" if state == _COMMA else _EXPECTED[state]
        remedy = _REMEDIES.get(found, "")
        if not remedy and word and state in (_KEY, _FIRST_KEY):
            remedy = "put the key in double quotes"
        elif not remedy and word and state in (_VALUE, _FIRST_VALUE):
            remedy = "write numbers as 10, -0.5 or 1e-5" if found[0] in "+-.0123456789" else "put text in double quotes"
        return refuse(*place, f"expected {expected}, got {shown}", remedy)
