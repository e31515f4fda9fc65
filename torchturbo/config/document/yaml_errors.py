"""What PyYAML or libyaml says about bad syntax, in the words of people who write configurations."""

from __future__ import annotations

from typing import Any, Final

from yaml import MarkedYAMLError, YAMLError
from yaml.reader import Reader, ReaderError

from torchturbo.config.document.nodes import MAX_DEPTH, Places, Refused, TreeBuilder, escaped
from torchturbo.errors import shorten

_QUOTE: Final = "put a text that starts with such a character in quotes"
_BACKSLASH: Final = "write \\\\ for a backslash, or use single quotes"
_BLOCK: Final = "does not fit the {} that starts at {{start}}"

# Words of the parser's context and problem (libyaml's and PyYAML's own), the message, the remedy, and whether the
# place is the start of what was being read rather than where the parser noticed. The first row that matches counts.
_ROWS: Final[tuple[tuple[str, str, str, str, bool], ...]] = (
    ("simple key", "expected ':'", "a key without ':'", "write `key: value`, with a blank after the colon", True),
    ("plain scalar", "unexpected ':'", "a ':' without a blank behind it", "write `key: value`", False),
    ("quoted scalar", "end of stream", "a quote that is never closed", "", True),
    ("quoted scalar", "document", "a quote that is never closed", "", True),
    ("", "invalid Unicode", "an escape that stands for no character", "write the character itself", False),
    ("quoted scalar", "hex", "an escape with too few digits", _BACKSLASH, False),
    ("quoted scalar", "escape", "an unknown escape in double quotes", _BACKSLASH, False),
    ("flow sequence", "expected", "expected ',' or ']' in the list that starts at {start}", "", False),
    ("flow mapping", "expected", "expected ',' or '}' in the mapping that starts at {start}", "", False),
    (
        "block mapping",
        "",
        _BLOCK.format("mapping"),
        "indent it like the keys there, and quote a text as a whole",
        False,
    ),
    ("block collection", "", _BLOCK.format("list"), "indent it like the items there, and start each with '- '", False),
    ("", "<document start>", "does not fit what stands before it", "indent all keys of the top level alike", False),
    ("node", "node content", "a value is missing here", _QUOTE, False),
    ("", "undefined tag handle", "an unknown tag", "remove it, or quote a text that starts with !", False),
    ("tag", "", "an unknown tag", "remove it, or quote a text that starts with !", True),
    ("an alias", "", "an alias without a name", "quote a text that starts with *", True),
    ("an anchor", "", "an anchor without a name", "quote a text that starts with &", True),
    ("directive", "", "a line that starts with % and is no directive", "write %YAML 1.2, or remove the line", True),
    ("", "nesting depth", f"nested deeper than {MAX_DEPTH} levels", "a configuration has a few", False),
    ("", "incompatible YAML", "YAML 1.1 and 1.2 are read, no other version", "write %YAML 1.2", False),
)


def explain(error: YAMLError, text: str, builder: TreeBuilder) -> Refused:
    """Return the parser's error in short words, at the place where a person would look."""
    if isinstance(error, ReaderError):
        return _unprintable(text, builder)
    assert isinstance(error, MarkedYAMLError)
    mark: Any = error.problem_mark or error.context_mark
    start: Any = error.context_mark or mark
    message, remedy, at_start = _words(error.context or "", error.problem or "", text, mark)
    if start is not mark and not text[mark.index :].strip():  # noticed at the end of the file
        at_start = True
        if text[start.index : start.index + 1] in ("[", "{"):
            message = f"'{text[start.index]}' is never closed"
    shown = start if at_start else mark
    message = message.replace("{start}", builder.place(start.line + 1, start.column + 1))
    return builder.refuse(shown.line + 1, shown.column + 1, message, remedy)


def _words(context: str, problem: str, text: str, mark: Any) -> tuple[str, str, bool]:
    character = text[mark.index : mark.index + 1]
    if character == "\t" and ("start any token" in problem or "tab" in problem):
        return "a tab where only spaces may stand", "indent with spaces", False
    if "start any token" in problem:
        return f"a value cannot start with {escaped(character)}", _QUOTE, False
    if "mapping values" in problem:
        before = text[mark.index - mark.column : mark.index]
        if ": " in before:
            return "a second ':' in one line", "put a text that contains ': ' in quotes", False
        remedy = "indent it like the keys beside it, and end the line above with ':' if this belongs to it"
        return "a key where none can stand", remedy, False
    for context_words, problem_words, message, remedy, at_start in _ROWS:
        if context_words in context and problem_words in problem:
            return message, remedy, at_start
    return f"no valid YAML: {shorten(problem, 200)}", "", False


def _unprintable(text: str, builder: TreeBuilder) -> Refused:
    """Return the error for the first character that YAML has no place for; the parsers disagree about its position."""
    found = Reader.NON_PRINTABLE.search(text)
    position = found.start() if found else 0
    character = text[position : position + 1]
    remedy = "save the file as UTF-8 text" if character == "\0" else "remove it, or write it as an escape in quotes"
    line, column = Places(text).at(position)
    return builder.refuse(line, column, f"the character {escaped(character)} is not allowed in YAML", remedy)
