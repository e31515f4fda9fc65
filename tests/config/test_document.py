"""A configuration file becomes nodes with places, or problems with places, whatever the file holds."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchturbo.config.document import Node, Row, Scalar, Table, files, read_document, yaml_reader
from torchturbo.config.document.nodes import MAX_DEPTH, MAX_NODES, MAX_PROBLEMS
from torchturbo.config.document.pure_yaml import PureParser

PARSERS = {"libyaml": yaml_reader.PARSER, "pure": PureParser}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read the YAML of this test with libyaml, and again with PyYAML's own parser."""
    name: str = request.param
    monkeypatch.setattr(yaml_reader, "PARSER", PARSERS[name])
    return name


def read(content: str | bytes, name: str = "t.yaml") -> tuple[Node | None, list[str]]:
    data = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(data)
    root, problems = read_document(name)
    return root, [str(problem) for problem in problems]


def good(content: str | bytes, name: str = "t.yaml") -> Any:
    root, problems = read(content, name)
    assert problems == []
    return plain(root)


def bad(content: str | bytes, name: str = "t.yaml") -> list[str]:
    _, problems = read(content, name)
    assert problems
    return problems


def plain(node: Node | None) -> Any:
    """Return a tree without places; a quoted scalar is shown in quotes."""
    if isinstance(node, Scalar):
        return f'"{node.text}"' if node.quoted else node.text
    if isinstance(node, Row):
        return [plain(item) for item in node.items]
    if isinstance(node, Table):
        return [(plain(key), plain(value)) for key, value in node.items]
    return None


def placed(node: Node | None) -> Any:
    """Return a tree as plain data with places."""
    if isinstance(node, Scalar):
        return node.text, node.quoted, node.line, node.column
    if isinstance(node, Row):
        return [(node.line, node.column), *map(placed, node.items)]
    if isinstance(node, Table):
        return {(node.line, node.column): [(placed(key), placed(value)) for key, value in node.items]}
    return None


# Good documents


@pytest.mark.usefixtures("parser")
class TestYaml:
    def test_nodes_carry_text_form_and_place(self) -> None:
        root, problems = read("# first\nmtp:\n  enabled: true\n  layers: [1, 'two']\n")
        assert not problems
        layers = [(4, 11), ("1", False, 4, 12), ("two", True, 4, 15)]
        mtp = {(3, 3): [(("enabled", False, 3, 3), ("true", False, 3, 12)), (("layers", False, 4, 3), layers)]}
        assert placed(root) == {(2, 1): [(("mtp", False, 2, 1), mtp)]}

    @pytest.mark.parametrize(
        ("text", "quoted"),
        [
            ("4", False),
            ("'4'", True),
            ('"4"', True),
            ("|-\n  4", True),
            (">-\n  4", True),
            ("!!str 4", True),
            ("! 4", True),
            ("!<tag:yaml.org,2002:str> 4", True),
            ('!!int "4"', False),
            ("!!float '4'", False),
            ("!!bool 4", False),
            ("!!null 4", False),
            ("!!int\t4", False),
        ],
    )
    def test_quoted_says_string_by_form(self, text: str, quoted: bool) -> None:
        assert good(f"a: {text}\n") == [("a", '"4"' if quoted else "4")]

    def test_tags_of_mapping_and_list(self) -> None:
        assert good("!!map {a: !!seq [1], b: ! {c: ! [2]}}") == [("a", ["1"]), ("b", [("c", ["2"])])]

    @pytest.mark.parametrize("key", ["1", "on", "null", "~", "mtp.enabled", "2026-01-01", "0x10"])
    def test_plain_key_is_its_text(self, key: str) -> None:
        assert good(f"{key}: 2\n") == [(key, "2")]

    def test_empty_value_is_empty_plain_text(self) -> None:
        assert good("mtp:\n  # enabled: true\ngbs: 7\n") == [("mtp", ""), ("gbs", "7")]

    @pytest.mark.parametrize(
        "text", ["", "\n\n", "# only\n# comments", "---", "---\n", "---\n# c\n...\n", "\ufeff", "  "]
    )
    def test_empty_document(self, text: str) -> None:
        assert read(text) == (None, [])

    def test_empty_quoted_document_is_no_empty_one(self) -> None:
        assert good("''") == '""'

    @pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
    def test_line_ends(self, newline: str) -> None:
        root, problems = read(f"a: 1{newline}{newline}b: 2")
        assert not problems
        assert placed(root) == {
            (1, 1): [(("a", False, 1, 1), ("1", False, 1, 4)), (("b", False, 3, 1), ("2", False, 3, 4))]
        }

    def test_columns_count_characters_and_no_byte_order_mark(self) -> None:
        root, _ = read("\ufeff😀é: {ключ: 值}")
        assert placed(root) == {
            (1, 1): [(("😀é", False, 1, 1), {(1, 5): [(("ключ", False, 1, 6), ("值", False, 1, 12))]})]
        }
        assert bad("\ufeff😀: é b: 2") == [
            "t.yaml:1:7: a second ':' in one line; put a text that contains ': ' in quotes"
        ]

    @pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
    def test_a_byte_order_mark_inside_the_file(self, newline: str) -> None:
        """Two files were joined; PyYAML's two parsers would read it differently."""
        assert bad(f"a: 1{newline}\ufeffb: 2") == [
            "t.yaml:2:1: a byte order mark inside the file; remove it, where two files were joined"
        ]
        assert good("a: 'x\ufeffy'") == [("a", '"x\ufeffy"')]

    @pytest.mark.parametrize("version", ["1.1", "1.2", "\t1.2\t# the version"])
    def test_version_directive(self, version: str) -> None:
        assert good(f"%YAML {version}\n---\na: yes\n") == [("a", "yes")]

    def test_alias_shares_the_node(self) -> None:
        root, problems = read("a: &x {n: 1}\nb: *x\nc: &y 5\n*y : 6\nd: [*y, *x]\n")
        assert not problems
        assert isinstance(root, Table)
        values = {key.text: value for key, value in root.items}
        assert values["a"] is values["b"] is values["d"].items[1]  # type: ignore[union-attr]
        assert plain(values["5"]) == "6"
        assert (values["b"].line, values["b"].column) == (1, 4)

    def test_anchor_given_again_means_the_later_one(self) -> None:
        assert good("[&a 1, &a 2, *a, &a [&a 3, *a]]") == ["1", "2", "2", ["3", "3"]]

    def test_merge_keys(self) -> None:
        root, problems = read(
            "base: &base {lr: 1, gbs: 2}\nmore: &more {gbs: 3, eps: 4}\n"
            "own: {gbs: 5, <<: [*more, *base]}\ninline: {<<: {x: 1}, <<: *base}\n"
        )
        assert not problems
        assert isinstance(root, Table)
        base, _, own, inline = (value for _, value in root.items)
        assert plain(own) == [("gbs", "5"), ("eps", "4"), ("lr", "1")]
        assert plain(inline) == [("x", "1"), ("lr", "1"), ("gbs", "2")]
        assert isinstance(base, Table)
        assert isinstance(own, Table)
        assert own.items[2] == base.items[0]  # the very nodes: the place is where they really stand
        assert own.items[2][1].line == 1

    def test_earlier_merged_mapping_wins_without_a_key_twice(self) -> None:
        text = "a: &a {x: 1}\nb: &b {x: 2}\nc: {<<: [*a, *b]}\nd: {<<: *b, <<: *a}\n"
        assert good(text)[2:] == [("c", [("x", "1")]), ("d", [("x", "2")])]

    def test_merged_mapping_may_merge_itself(self) -> None:
        text = "a: &a {x: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b, y: 3}\n"
        assert good(text)[2] == ("c", [("y", "3"), ("x", "1")])

    def test_long_chain_of_merges_is_no_depth(self) -> None:
        chain = "".join(f"m{i}: &m{i} {{<<: *m{i - 1}, k{i}: 1}}\n" for i in range(1, 150))
        assert len(good(f"m0: &m0 {{k0: 1}}\n{chain}")[-1][1]) == 150

    def test_quoted_merge_key_is_a_plain_key(self) -> None:
        assert good("'<<': {a: 1}\n") == [('"<<"', [("a", "1")])]

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("a:\t1\n", "1"),
            ("a: \t1\t\n", "1"),
            ("a: 1\t# a comment\n", "1"),
            ("a: one\ttwo\n", "one\ttwo"),
            ("a: [\n\t1,\t2\t]\n", ["1", "2"]),
            ('a: "one\ttwo"\n', '"one\ttwo"'),
            ("a: |\t\n  x\n", '"x\n"'),
        ],
    )
    def test_tab_separates(self, text: str, value: Any) -> None:
        assert good(text) == [("a", value)]

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("a:\n\tb: 1\n", "2:1: a"),
            ("\ta: 1\n", "1:1"),
            ("a: |\n\tx\n", "2:1: a"),
            ("a: b\n\tc\n", "2:1: a"),
            ("a: [b\n\tc]\n", "2:1: a[0]"),
            ("-\t1\n", "1:2: [0]"),
        ],
    )
    def test_tab_does_not_indent(self, text: str, place: str) -> None:
        assert bad(text) == [f"t.yaml:{place}: a tab where only spaces may stand; indent with spaces"]


# Problems of single keys and values: collected, the rest is still read


@pytest.mark.usefixtures("parser")
class TestYamlProblems:
    def test_duplicate_key_names_both_places(self) -> None:
        root, problems = read("gbs: 1\nmtp: {n: 1, o: 2, n: 3}\ngbs: 4\n")
        assert problems == [
            "t.yaml:2:19: mtp.n: key given twice (first at t.yaml:2:7); keep one of the two",
            "t.yaml:3:1: gbs: key given twice (first at t.yaml:1:1); keep one of the two",
        ]
        assert plain(root) == [("gbs", "1"), ("mtp", [("n", "1"), ("o", "2")])]

    def test_duplicate_whatever_its_form(self) -> None:
        assert "first at t.yaml:1:1" in bad("a: 1\n'a': 2\n")[0]

    @pytest.mark.parametrize(
        "tag",
        ["!foo", "!!python/object:os.system", "!!binary", "!!timestamp", "!!merge", "!<x:y>", "!!set"],
    )
    def test_unknown_tag(self, tag: str) -> None:
        for value in ("x", "'x'", "{x: 1}", "[x]"):
            (problem,) = bad(f"s:\n  k: {tag} {value}\n")
            assert problem == f"t.yaml:2:6: s.k: unknown tag {tag}; remove it, or quote a text that starts with !"

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("!!int {x: 1}", "tag !!int on a mapping"),
            ("!!map [x]", "tag !!map on a list"),
            ("!!seq x", "tag !!seq on a single value"),
        ],
    )
    def test_tag_of_another_kind(self, value: str, message: str) -> None:
        assert bad(f"k: {value}\n") == [f"t.yaml:1:4: k: {message}; remove it"]

    @pytest.mark.parametrize("key", ["? [x]\n: ", "? {x: 1}\n: ", "[x]: "])
    def test_complex_key(self, key: str) -> None:
        root, (problem,) = read(f"{key}{{y: 2}}\nz: 3\n")
        assert "a mapping or a list cannot be a key" in problem
        assert plain(root) == [("z", "3")]

    def test_alias_to_a_list_as_key(self) -> None:
        root, (problem,) = read("a: &a [1]\n*a : 2\nb: 3\n")
        assert problem.startswith("t.yaml:2:1: a mapping or a list cannot be a key")
        assert plain(root) == [("a", ["1"]), ("b", "3")]

    def test_undefined_alias(self) -> None:
        root, (problem,) = read("a: {b: [1, *x]}\nd: 2\n")
        assert problem.startswith("t.yaml:1:12: a.b[1]: undefined alias *x; mark a value above it with &x")
        assert plain(root) == [("a", [("b", ["1"])]), ("d", "2")]
        assert "undefined alias *x" in bad("*x")[0]
        assert plain(read("*x : 1\nb: 2\n")[0]) == [("b", "2")]

    @pytest.mark.parametrize(
        ("text", "places"),
        [
            ("&a [*a]", ("t.yaml:1:5: [0]", "1:1")),
            ("k: &a {l: {m: *a}}", ("t.yaml:1:15: k.l.m", "1:4")),
            ("k: &a {<<: *a}", ("t.yaml:1:12: k.<<", "1:4")),
            ("k: &a {*a : 1}", ("t.yaml:1:8: k", "1:4")),
        ],
    )
    def test_cyclic_alias_names_both_places(self, text: str, places: tuple[str, str]) -> None:
        here, anchor = places
        assert bad(text) == [
            f"{here}: cyclic alias *a: it stands inside the value it means (&a at t.yaml:{anchor})",
        ]

    @pytest.mark.parametrize(
        ("merge", "found"),
        [
            ("1", "text"),
            ("", "text"),
            ("*n", "text"),
            ("[{a: 1}, 2]", "text"),
            ("[[{a: 1}]]", "a list inside the list"),
        ],
    )
    def test_merge_of_no_mapping(self, merge: str, found: str) -> None:
        root, problems = read(f"n: &n 1\ns:\n  <<: {merge}\n  b: 2\n")
        message = f"expected a mapping or a list of mappings to merge, got {found}"
        assert problems == [f"t.yaml:3:3: s.<<: {message}; write `<<: *name`, where &name marks a mapping"]
        assert isinstance(root, Table)
        assert plain(root.items[1][1])[0] == ("b", "2")

    def test_second_document(self) -> None:
        root, problems = read("a: 1\n---\nb: 2\n")
        assert problems == ["t.yaml:2:1: a second document starts here; keep one document in a file"]
        assert plain(root) == [("a", "1")]

    def test_all_are_reported_together_with_the_syntax_error(self) -> None:
        text = "a: *x\nb: !foo 1\n? [k]\n: 2\na: 3\nr: [{c: &c [*c]}]\nd: 'open\n"
        root, problems = read(text)
        assert root is None
        assert [problem.split(": ")[:2] for problem in problems] == [
            ["t.yaml:1:4", "a"],
            ["t.yaml:2:4", "b"],
            ["t.yaml:3:3", "a mapping or a list cannot be a key; write the key as plain text; quote a text that starts"
             " with [ or {"],
            ["t.yaml:5:1", "a"],
            ["t.yaml:6:13", "r[0].c[0]"],
            ["t.yaml:7:4", "d"],
        ]  # fmt: skip

    def test_a_file_full_of_problems_is_not_read_on(self) -> None:
        problems = bad("a: 1\n" * 5000)
        assert len(problems) == MAX_PROBLEMS + 1
        assert problems[-1].startswith(f"t.yaml:101:1: {MAX_PROBLEMS} problems up to here")


# Syntax


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: b: c\n", "1:5: a second ':' in one line; put a text that contains ': ' in quotes"),
        ("a: 1\n b: 2\n", "2:3: a key where none can stand; indent it like the keys beside it, and"),
        ("b\na: 1\n", "2:2: a key where none can stand"),
        ("a: 1\nbcd\n", "2:1: a key without ':'; write `key: value`, with a blank after the colon"),
        ("s:\n  gbs:4\n  lr: 1\n", "3:5: a key where none can stand"),
        (" a: 1\nb: 2\n", "2:1: does not fit what stands before it; indent all keys of the top level alike"),
        ("s:\n  - b\n - c\n", "3:2: does not fit the mapping that starts at t.yaml:1:1; indent it like the keys there"),
        ("a: 'x' y\n", "1:8: does not fit the mapping that starts at t.yaml:1:1; indent it like the keys there, and q"),
        ("- a\nb: 1\n", "2:1: [1]: does not fit the list that starts at t.yaml:1:1; indent it like the items there"),
        ("a: 'x\n\nb: 1\n", "1:4: a: a quote that is never closed"),
        ('a: "x\n---\nb: "', "1:4: a: a quote that is never closed"),
        ("a: [1,\nb: 2\n", "1:4: a[2]: '[' is never closed"),
        ("a: {b: 1\n", "1:4: a: '{' is never closed"),
        ("a: [1, 2\nb: 2\nc: ]", "2:2: a[2]: expected ',' or ']' in the list that starts at t.yaml:1:4"),
        ("a: {b: 1 c: 2}", "1:11: a: expected ',' or '}' in the mapping that starts at t.yaml:1:4"),
        ("a: }\n", "1:4: a: a value is missing here; put a text that starts with such a character in quotes"),
        ("a: @x\n", "1:4: a: a value cannot start with '@'; put a text that starts with such a character in quotes"),
        ("a: %x\n", "1:4: a: a value cannot start with '%'"),
        ("a: `x`\n", "1:4: a: a value cannot start with '`'"),
        ("a: *\n", "1:4: a: an alias without a name; quote a text that starts with *"),
        ("a: &\n", "1:4: a: an anchor without a name; quote a text that starts with &"),
        ("a: !e!x 1\n", "1:4: a: an unknown tag; remove it, or quote a text that starts with !"),
        ("a: !<\n", "1:4: a: an unknown tag"),
        ("%YAML 2.0\n---\na: 1\n", "1:1: YAML 1.1 and 1.2 are read, no other version; write %YAML 1.2"),
        ("%YAML x\n---\na: 1\n", "1:1: a line that starts with % and is no directive"),
        ("%YAML 1.2\n%YAML 1.2\n---\na: 1\n", "2:1: no valid YAML: found duplicate "),
        ("a: \x01", "1:4: the character U+0001 is not allowed in YAML; remove it, or write it as an escape in quotes"),
        ("a: 1\r\né😀\0", "2:3: the character U+0000 is not allowed in YAML; save the file as UTF-8 text"),
        ("a: \x7f", "1:4: the character U+007F is not allowed in YAML"),
    ],
)
def test_yaml_syntax_error_in_plain_words(text: str, expected: str) -> None:
    problems = bad(text)
    assert len(problems) == 1
    assert problems[0].removeprefix("t.yaml:").startswith(expected)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("escape", ["\\ud800", "\\ud83d\\ude00", "\\UFFFFFFFF", "\\q", "\\xg0", "C:\\models"])
def test_yaml_bad_escape(escape: str) -> None:
    (problem,) = bad(f'a: "{escape}"\n')
    assert problem.startswith("t.yaml:1:")
    assert "a: an " in problem
    assert " escape" in problem


def test_huge_version_number_is_no_crash_of_the_pure_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_reader, "PARSER", PureParser)
    assert bad(f"%YAML {'9' * 5000}.1\n---\n")[0].startswith("t.yaml:1:")


# JSON


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -0.5e-3, true, false, null, "t"]}', [('"a"', ["1", "-0.5e-3", "true", "false", "null", '"t"'])]),
        ('\ufeff {"a":{},"b":[]} ', [('"a"', []), ('"b"', [])]),
        (r'["\ud83d\ude00\n\/\u00e9"]', ['"😀\n/é"']),
        ('{"<<": {"a": 1}}', [('"<<"', [('"a"', "1")])]),
        ("1E5", "1E5"),
        ("", None),
        (" \r\n\t", None),
        ("\ufeff", None),
    ],
)
def test_json(text: str, value: Any) -> None:
    assert good(text, "t.json") == value


def test_json_by_suffix_in_any_case() -> None:
    assert good('{"a":\t1}', "T.JSON") == [('"a"', "1")]
    assert "comment" in bad("# c\n{}", "t.Json")[0]
    assert good("# c\n{}", "t.json.txt") == []


def test_json_places() -> None:
    root, _ = read('\ufeff{\r\n "😀": {"b": 1},\n\r"c": [ 2]}', "t.json")
    assert placed(root) == {
        (1, 1): [
            (("😀", True, 2, 2), {(2, 7): [(("b", True, 2, 8), ("1", False, 2, 13))]}),
            (("c", True, 4, 1), [(4, 6), ("2", False, 4, 8)]),
        ]
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1,"b":{"c":1,"c":2},"a":3}', "1:19: b.c: key given twice (first at t.json:1:13); keep one of the two"),
        ('{"a": NaN}', "1:7: a: expected a value, got 'NaN'; JSON has no such number"),
        ('{"a": Infinity}', "1:7: a: expected a value, got 'Infinity'; JSON has no such number"),
        ("[-Infinity]", "1:2: [0]: expected a value or ']', got '-Infinity'; JSON has no such number"),
        ('{"a": 1,\n}', "1:8: a comma before '}'; remove the comma"),
        ("[1, ]", "1:3: [1]: a comma before ']'; remove the comma"),
        ("[1,,2]", "1:4: [1]: expected a value, got ','"),
        ("[,]", "1:2: [0]: expected a value or ']', got ','"),
        (
            '{"a": 1} // c',
            "1:10: expected the end of the file, got '/'; JSON has no comments; remove it, or use a .yam",
        ),
        ("# c\n{}", "1:1: expected a value, got '#'; JSON has no comments"),
        ("{'a': 1}", "1:2: expected a key in double quotes or '}', got \"'\"; use double quotes"),
        ("{a: 1}", "1:2: expected a key in double quotes or '}', got 'a'; put the key in double quotes"),
        ('{"a": True}', "1:7: a: expected a value, got 'True'; write true"),
        ('{"a": yes}', "1:7: a: expected a value, got 'yes'; put text in double quotes"),
        ('{"a": 010}', "1:7: a: expected a value, got '010'; write numbers as 10, -0.5 or 1e-5"),
        ("[+1]", "1:2: [0]: expected a value or ']', got '+1'"),
        ("[.5]", "1:2: [0]: expected a value or ']', got '.5'"),
        ("[1.]", "1:2: [0]: expected a value or ']', got '1.'"),
        ("[1_000]", "1:2: [0]: expected a value or ']', got '1_000'"),
        ("[١]", "1:2: [0]: expected a value or ']', got '١'"),
        ("[1.١]", "1:2: [0]: expected a value or ']', got '1.١'"),
        ("[1١]", "1:2: [0]: expected a value or ']', got '1١'"),
        ("[\u00a01]", "1:2: [0]: expected a value or ']', got U+00A0"),
        ('{"a" 1}', "1:6: a: expected ':', got '1'"),
        ('{"a": 1 "b": 2}', "1:9: expected ',' or '}', got '\"'"),
        ("[1}", "1:3: [1]: expected ',' or ']', got '}'"),
        ('{"a": 1}\n{"b": 2}', "2:1: expected the end of the file, got '{'"),
        ('{"a": [1,\n2', "1:7: a[2]: '[' is never closed"),
        ('{"a": 1', "1:1: '{' is never closed"),
        ('{"a": "x', "1:7: a: a quote that is never closed"),
        (
            '{"a": "x\ny"}',
            "1:9: a: a line break, tab or other control character in a string; close the quote, or write",
        ),
        (r'{"a": "C:\models"}', "1:10: a: an unknown escape; write \\\\ for a backslash"),
        (r'{"a": "\u12"}', "1:9: a: an escape that stands for no character; write \\u and four digits"),
        (r'{"a": "\ud800"}', "1:7: a: an escape that stands for no character (half of a surrogate pair)"),
        (r'{"\udc00": 1}', "1:2: an escape that stands for no character (half of a surrogate pair)"),
        ("\0", "1:1: expected a value, got U+0000"),
    ],
)
def test_json_error(text: str, expected: str) -> None:
    (problem,) = bad(text, "t.json")[:1]
    assert problem.removeprefix("t.json:").startswith(expected)


# Limits


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "text",
    ["[" * 10_000, '{"a":' * 10_000, "- " * 10_000, "? " * 10_000, "\n".join(" " * i + "a:" for i in range(1000))],
)
def test_yaml_nesting_limit(text: str) -> None:
    start = time.perf_counter()
    assert "nested deeper than 100 levels" in bad(text)[-1]
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
def test_deepest_allowed(name: str) -> None:
    good("[" * MAX_DEPTH + "]" * MAX_DEPTH, name)
    problems = bad("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), name)
    assert problems == [f"{name}:1:101: nested deeper than 100 levels; a configuration has a few"]
    assert "nested deeper" in bad('{"a":' * 100_000, name)[-1]


@pytest.mark.usefixtures("parser")
def test_depth_through_aliases() -> None:
    def chain(length: int) -> str:
        return "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, length))

    good(chain(MAX_DEPTH - 1))
    assert bad(chain(MAX_DEPTH + 1)) == [
        f"t.yaml:{MAX_DEPTH}:12: nested deeper than 100 levels; a configuration has a few",
    ]


@pytest.mark.usefixtures("parser")
def test_size_through_aliases() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 50))
    (problem,) = bad(bomb)
    assert "a5[3]: more than 100,000 keys and values, aliases followed" in problem
    merges = f"a: &a {{x: 1}}\nb: {{<<: [{'*a,' * 50_000}]}}\n"
    assert "more than 100,000" in bad(merges)[0]


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
def test_size(name: str) -> None:
    good(f"[{'1,' * (MAX_NODES - 2)}1]", name)
    assert "more than 100,000 keys and values" in bad(f"[{'[],' * (MAX_NODES - 1)}[]]", name)[0]
    assert "more than 100,000 keys and values" in bad(f"[{'1,' * (MAX_NODES - 1)}1]", name)[0]


# What the file is


def only(path: str) -> str:
    root, (problem,) = read_document(path)
    assert root is None
    return str(problem)


def test_missing_file() -> None:
    assert only("t.yaml") == f"t.yaml: no such file; the path is taken from {os.getcwd()}"
    Path("t.yml").touch()
    assert only("t.yaml") == "t.yaml: no such file; did you mean t.yml?"
    assert only("~/t.yaml").endswith("the shell left ~ as it is; write the path out")
    assert only(os.path.abspath("x")).endswith("x: no such file; check the path")


def test_missing_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert only("t.yaml") == "t.yaml: no such file; the working directory no longer exists"


def test_directory_pipe_socket_device() -> None:
    Path("folder.yaml").mkdir()
    assert only("folder.yaml") == "folder.yaml: expected a file, got a directory; name a YAML or JSON file"
    os.mkfifo("pipe.json")
    assert "got a pipe" in only("pipe.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "got a socket" in only("socket")
    assert "got a device" in only("/dev/zero")


def test_link_loop_long_name_and_nul() -> None:
    os.symlink("b.yaml", "a.yaml")
    os.symlink("a.yaml", "b.yaml")
    assert only("a.yaml") == f"a.yaml: cannot be read: {os.strerror(errno.ELOOP)}"
    assert only("x" * 5000).endswith(os.strerror(errno.ENAMETOOLONG))
    assert only("a\0b.yaml") == "a\\0b.yaml: no file can have this name"
    assert "no file can have this name" in only("a\ud800.yaml")
    Path("t.yaml").touch()
    assert "t.yaml/x: cannot be read" in only("t.yaml/x")


def test_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    Path("t.yaml").touch()
    monkeypatch.setattr(files, "open", refuse, raising=False)
    assert only("t.yaml") == "t.yaml: cannot be read: Permission denied"


def test_read_error_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("lost")

    Path("t.yaml").touch()
    monkeypatch.setattr(files, "open", refuse, raising=False)
    assert only("t.yaml") == "t.yaml: cannot be read: lost"


def test_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    with open("t.yaml", "wb") as file:
        file.truncate(50_000_000)
    monkeypatch.setattr(files, "open", refuse, raising=False)
    message = "larger than 10 MB; a configuration is a few kilobytes; is it the right file?"
    assert only("t.yaml") == f"t.yaml: {message}"


def test_file_that_grows_is_read_to_the_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert 0 < size <= files.MAX_BYTES + 1
            return b"#" * size

    Path("t.yaml").touch()
    monkeypatch.setattr(files, "open", lambda *_, **__: Endless(), raising=False)
    assert "larger than 10 MB" in only("t.yaml")


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a: 1\r\nb\xc3\xa9\xf0\x9f\x98\x80: \xff\n", ":2:6: expected UTF-8, got byte 0xFF; save the file as UTF-8"),
        (b"\xef\xbb\xbf\xe9", ":1:1: expected UTF-8, got byte 0xE9; save the file as UTF-8"),
        (b"\xed\xa0\x80", ":1:1: expected UTF-8, got byte 0xED; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), ": expected UTF-8, got UTF-16; save the file as UTF-8"),
        (b"\xfe\xff" + "a: 1".encode("utf-16-be"), ": expected UTF-8, got UTF-16; save the file as UTF-8"),
        ("a: 1".encode("utf-32"), ": expected UTF-8, got UTF-32; save the file as UTF-8"),
        (b"\x00\x00\xfe\xff" + "a: 1".encode("utf-32-be"), ": expected UTF-8, got UTF-32; save the file as UTF-8"),
    ],
)
def test_encoding(name: str, data: bytes, expected: str) -> None:
    assert bad(data, name) == [f"{name}{expected}"]


def run_python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True
    ).stdout.decode()


def test_utf8_whatever_the_locale() -> None:
    Path("t.yaml").write_bytes('card: "▁"\nx: é'.encode())
    code = "from torchturbo.config.document import read_document as r; print(ascii(r('t.yaml')))"
    printed = run_python(code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert "Scalar('\\u2581', True, 1:7)" in printed
    assert "Scalar('\\xe9', False, 2:4)" in printed


def test_pure_parser_without_libyaml() -> None:
    Path("t.yaml").write_text("a:\t1\n")
    code = (
        "import sys; sys.modules['yaml._yaml'] = None\n"
        "from torchturbo.config.document import read_document, yaml_reader\n"
        "print(yaml_reader.PARSER.__name__, read_document('t.yaml'))"
    )
    assert run_python(code).startswith("PureParser (Table([(Scalar('a', False, 1:1), Scalar('1', False, 1:4))]")


def test_each_format_imports_its_own_parser_alone() -> None:
    Path("t.json").write_text("{}")
    Path("t.yaml").write_text("{}")
    code = (
        "import sys; from torchturbo.config.document import read_document\n"
        "heavy = {'yaml', 'json'}; print(*heavy & set(sys.modules), end=';')\n"
        "read_document('t.%s'); print(*heavy & set(sys.modules))"
    )
    assert run_python(code % "json") == ";json\n"
    assert run_python(code % "yaml") == ";yaml\n"


# Properties

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029\ufeff\ufffe\uffff"))
LITERALS = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(json.dumps),
    st.sampled_from(["true", "false", "null", "1E5", "-0", "1.50"]),
)
DATA = st.recursive(
    st.tuples(st.just("literal"), LITERALS) | st.tuples(st.just("string"), WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


def to_json(data: Any, indent: str, ascii_only: bool, level: int = 0) -> str:
    line, end = (f"\n{indent * (level + 1)}", f"\n{indent * level}") if indent else ("", "")
    if isinstance(data, tuple):
        return data[1] if data[0] == "literal" else json.dumps(data[1], ensure_ascii=ascii_only)
    if isinstance(data, list):
        items = [to_json(item, indent, ascii_only, level + 1) for item in data]
        return f"[{','.join(line + item for item in items)}{end}]"
    pairs = [
        f"{json.dumps(key, ensure_ascii=ascii_only)}: {to_json(value, indent, ascii_only, level + 1)}"
        for key, value in data.items()
    ]
    return f"{{{','.join(line + pair for pair in pairs)}{end}}}"


def yaml_string(text: str) -> str:
    if text.isprintable() and len(text) % 2:
        return "'" + text.replace("'", "''") + "'"
    shown = yaml.dump(text, default_style='"', allow_unicode=True, width=10**9)
    return shown.removesuffix("\n")


def to_yaml(data: Any, level: int = 0) -> str:
    """Return block style YAML; what follows a key or a dash starts with a blank or a line break."""
    indent = "\n" + "  " * level
    if isinstance(data, tuple):
        return " " + (data[1] if data[0] == "literal" else yaml_string(data[1]))
    if not data:
        return " []" if isinstance(data, list) else " {}"
    if isinstance(data, list):
        return "".join(f"{indent}-{to_yaml(item, level + 1)}" for item in data)
    return "".join(f"{indent}{yaml_string(key)}:{to_yaml(value, level + 1)}" for key, value in data.items())


SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60, database=None
)


@pytest.mark.usefixtures("parser")
@SAME_FOLDER
@given(DATA, st.booleans())
def test_same_content_same_tree(data: Any, ascii_only: bool) -> None:
    from_json = good(to_json(data, "  ", ascii_only), "t.json")
    assert from_json == good(to_yaml(data).lstrip("\n"))


@pytest.mark.usefixtures("parser")
@SAME_FOLDER
@given(DATA, st.sampled_from(["", "  ", "\t"]))
def test_json_text_read_as_yaml_has_the_same_places(data: Any, indent: str) -> None:
    text = to_json(data, indent, ascii_only=False)
    from_json, problems = read(text, "t.json")
    assert not problems
    from_yaml, problems = read(text)
    assert not problems
    assert placed(from_json) == placed(from_yaml)


@SAME_FOLDER
@given(DATA, st.sampled_from(["", "\t"]), st.booleans())
def test_json_agrees_with_the_standard_library(data: Any, indent: str, ascii_only: bool) -> None:
    text = to_json(data, indent, ascii_only)

    def value(node: Node | None) -> Any:
        if isinstance(node, Table):
            return {key.text: value(item) for key, item in node.items}
        if isinstance(node, Row):
            return [value(item) for item in node.items]
        assert isinstance(node, Scalar)
        return node.text if node.quoted else json.loads(node.text)

    assert value(read(text, "t.json")[0]) == json.loads(text)


PIECES = [
    "a",
    "b",
    ":",
    ":\t",
    "\t",
    "\n",
    "\n",
    "",
    "",
    "\n\t",
    "-",
    "-\t",
    "#c",
    "[",
    "]",
    "{",
    "}",
    ",",
    '"x"',
    "'y'",
    "|",
    ">",
    "&a",
    "*a",
    "!!str",
    "!!int\t",
    "!foo",
    '"',
    "'",
    "\\",
    "1",
    "---",
    "...",
    "<<:",
    "a:",
    "",
    "\nb:",
    "",
    "é",
    "😀",
    "\x00",
    "\x07",
    "\u2028",
    "\ufeff",
    "%YAML",
    "NaN",
    "true",
]


@pytest.mark.usefixtures("parser")
def test_no_text_makes_it_fail() -> None:
    dice = random.Random(0)
    for _ in range(400):
        text = "".join(dice.choice(PIECES) or " " for _ in range(dice.randint(1, 40)))
        for name in ("t.yaml", "t.json"):
            read(text, name)


@pytest.mark.usefixtures("parser")
@SAME_FOLDER
@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    read(data)
    read(data, "t.json")


def test_both_parsers_read_tabs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    pieces = ["a", "b: ", ":\t", "\t", " ", "\n", "\n  ", "\n\t", "- ", "-\t", " #c", "[", "]", "{", "}", ", ", '"x"']
    compared = 0
    for _ in range(3000):
        text = "".join(dice.choice(pieces) for _ in range(dice.randint(1, 8)))
        results = []
        for parser_class in PARSERS.values():
            monkeypatch.setattr(yaml_reader, "PARSER", parser_class)
            root, problems = read(text)
            results.append((placed(root), bool(problems)))
        assert results[0] == results[1], repr(text)
        compared += "\t" in text and not results[0][1]
    assert compared > 100
