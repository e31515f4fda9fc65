"""YAML text into nodes, from PyYAML's stream of events, which nests nothing and copies nothing."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from torchturbo.config.document.nodes import Branch, Places, Row, Scalar, Table, TreeBuilder
from torchturbo.errors import shorten

PARSER: Any
"""The parser in use: libyaml's where PyYAML was built with it."""
if yaml.__with_libyaml__:
    from yaml._yaml import CParser as PARSER
else:
    from torchturbo.config.document.pure_yaml import PureParser as PARSER

_CORE: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = frozenset(_CORE + name for name in ("int", "float", "bool", "null"))
_TEXT_TAGS: Final = frozenset((_CORE + "str", "!"))
_TABLE_TAGS: Final = frozenset((_CORE + "map", "!"))
_ROW_TAGS: Final = frozenset((_CORE + "seq", "!"))
_KNOWN_TAGS: Final = _PLAIN_TAGS | _TEXT_TAGS | _TABLE_TAGS | _ROW_TAGS


def read_yaml(text: str, builder: TreeBuilder) -> None:
    """Hand the nodes of one YAML document to the builder.

    Args:
        text: the whole file, without a byte order mark.
        builder: gets the nodes and the problems of single keys and values.

    Raises:
        Refused: the text is no YAML from some place on, or it exceeds a limit of the builder.
    """
    if "\ufeff" in text and (found := re.search("[\n\r\x85\u2028\u2029]\ufeff", text)):
        # libyaml takes it for a blank and PyYAML's own parser for text.
        line, column = Places(text).at(found.end() - 1)
        raise builder.refuse(
            line, column, "a byte order mark inside the file", "remove it, where two files were joined"
        )
    try:
        _build(PARSER(text), builder)
    except yaml.YAMLError as error:
        from torchturbo.config.document.yaml_errors import explain

        raise explain(error, text, builder) from error
    root = builder.root
    if type(root) is Scalar and not root.text and not root.quoted:
        builder.root = None  # nothing but comments or `---`


def _build(parser: Any, builder: TreeBuilder) -> None:
    anchors: dict[str, Scalar | Branch] = {}
    documents = 0
    while True:
        event = parser.get_event()
        kind = type(event)
        if kind is ScalarEvent:
            mark = event.start_mark
            scalar = Scalar(event.value, bool(event.style), mark.line + 1, mark.column + 1)
            if event.tag is not None:
                _apply_tag(event.tag, scalar, builder)
            if event.anchor is not None:
                anchors[event.anchor] = scalar
            builder.scalar(scalar)
        elif kind is MappingStartEvent or kind is SequenceStartEvent:
            branch = _open(event, kind is MappingStartEvent, builder)
            if event.anchor is not None:
                anchors[event.anchor] = branch
        elif kind is MappingEndEvent or kind is SequenceEndEvent:
            builder.close()
        elif kind is AliasEvent:
            _alias(event, anchors, builder)
        elif kind is DocumentStartEvent:
            documents += 1
            if documents > 1:
                line, column = event.start_mark.line + 1, event.start_mark.column + 1
                builder.report(line, column, "a second document starts here", "keep one document in a file")
                return
        elif kind is StreamEndEvent:
            return


def _open(event: Any, is_table: bool, builder: TreeBuilder) -> Branch:
    line, column = event.start_mark.line + 1, event.start_mark.column + 1
    if event.tag is not None and event.tag not in (_TABLE_TAGS if is_table else _ROW_TAGS):
        _report_tag(event.tag, "a mapping" if is_table else "a list", line, column, builder)
    return builder.open(Table(line, column) if is_table else Row(line, column))


def _alias(event: Any, anchors: dict[str, Scalar | Branch], builder: TreeBuilder) -> None:
    name, line, column = event.anchor, event.start_mark.line + 1, event.start_mark.column + 1
    if name in anchors:
        builder.alias(anchors[name], name, line, column)
        return
    name = shorten(name)
    remedy = f"mark a value above it with &{name}, or quote a text that starts with *"
    builder.report(line, column, f"undefined alias *{name}", remedy)
    builder.drop(line, column)


def _apply_tag(tag: str, scalar: Scalar, builder: TreeBuilder) -> None:
    if tag in _PLAIN_TAGS:
        scalar.quoted = False
    elif tag in _TEXT_TAGS:
        scalar.quoted = True
    else:
        _report_tag(tag, "a single value", scalar.line, scalar.column, builder)


def _report_tag(tag: str, found: str, line: int, column: int, builder: TreeBuilder) -> None:
    shown = f"!!{tag.removeprefix(_CORE)}" if tag.startswith(_CORE) else tag if tag.startswith("!") else f"!<{tag}>"
    shown = shorten(shown)
    if tag in _KNOWN_TAGS:
        builder.report(line, column, f"tag {shown} on {found}", "remove it")
    else:
        builder.report(line, column, f"unknown tag {shown}", "remove it, or quote a text that starts with !")
