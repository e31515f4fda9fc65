"""PyYAML's own parser, for a PyYAML without libyaml, brought in line with libyaml: both must read a file alike."""

from __future__ import annotations

from typing import Any

from yaml.events import ScalarEvent
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner, ScannerError


class PureParser(Reader, Scanner, Parser):
    """Events of a YAML text.

    As in libyaml a tab may stand wherever a blank only separates (``gbs:<TAB>4``), but never indents, an escape in a
    quoted text must stand for a character that exists, a question mark inside a plain text is part of it, and no directive
    but %YAML and %TAG is known.
    """

    def __init__(self, text: str) -> None:
        self._tabs = "none"  # where a tab counts as a blank: none, gap (between tokens), plain (in plain text), all
        self._plain_line = self._plain_indent = 0
        self._in_plain = self._in_indicators = False
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def get_event(self) -> Any:
        try:
            event: Any = super().get_event()  # type: ignore[no-untyped-call]
        except (ValueError, OverflowError) as error:  # "\UFFFFFFFF"; a %YAML version of 5,000 digits
            raise ScannerError(None, None, "found invalid Unicode character escape code", self.get_mark()) from error
        if type(event) is ScalarEvent and any("\ud800" <= character <= "\udfff" for character in event.value):
            mark: Any = event.start_mark
            raise ScannerError(None, None, "found invalid Unicode character escape code", mark)
        return event

    def peek(self, index: int = 0) -> str:
        character: str = super().peek(index)
        if character == "?" and self._in_plain:
            return "a"  # libyaml ends no plain text of a flow collection there; only what kind it is counts here
        if character == "#" and self._in_indicators:
            return " "  # a comment may follow `|` and `>` at once
        return " " if character == "\t" and self._is_blank_tab() else character

    def _is_blank_tab(self) -> bool:
        if self._tabs == "gap":
            return bool(self.flow_level) or not self.allow_simple_key
        if self._tabs == "plain":
            return bool(self.line == self._plain_line or self.column >= self._plain_indent)
        return self._tabs == "all"

    def _scan(self, tabs: str, scan: Any, *arguments: Any) -> Any:
        self._tabs = tabs
        result = scan(*arguments)
        self._tabs = "none"
        return result

    def scan_to_next_token(self) -> None:
        self._scan("gap", super().scan_to_next_token)

    def scan_tag(self) -> Any:
        return self._scan("all", super().scan_tag)

    def scan_directive(self) -> Any:
        return self._scan("all", super().scan_directive)

    def scan_block_scalar_indicators(self, start_mark: Any) -> Any:
        self._in_indicators = True
        result = self._scan("all", super().scan_block_scalar_indicators, start_mark)
        self._in_indicators = False
        return result

    def scan_block_scalar_ignored_line(self, start_mark: Any) -> Any:
        return self._scan("all", super().scan_block_scalar_ignored_line, start_mark)

    def scan_plain(self) -> Any:
        self._in_plain = True
        token: Any = super().scan_plain()
        self._in_plain = False
        colon = self.peek() == ":" and self.peek(1) in ",[]{}"  # a key's, for PyYAML, without a blank behind it
        if self.flow_level and (colon or ":?" in token.value):
            raise ScannerError(
                "while scanning a plain scalar", token.start_mark, "found unexpected ':'", self.get_mark()
            )
        return token

    def scan_directive_name(self, start_mark: Any) -> Any:
        name: Any = super().scan_directive_name(start_mark)  # type: ignore[no-untyped-call]
        if name not in ("YAML", "TAG"):
            raise ScannerError(
                "while scanning a directive", start_mark, "found unknown directive name", self.get_mark()
            )
        return name

    def scan_plain_spaces(self, indent: int, start_mark: Any) -> Any:
        self._plain_line, self._plain_indent = self.line, indent
        spaces = self._scan("plain", super().scan_plain_spaces, indent, start_mark)
        self._refuse_tab()  # only one that would indent is left over
        return spaces

    def scan_block_scalar_indentation(self) -> Any:
        result = super().scan_block_scalar_indentation()
        self._refuse_tab()
        return result

    def _refuse_tab(self) -> None:
        if self.peek() == "\t":
            raise ScannerError(None, None, "found a tab character that violates indentation", self.get_mark())
