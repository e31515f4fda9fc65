"""Reading training files: what each kind of row becomes, and what a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from torchturbo.train.rows import MOST_PROBLEMS, RowError, parse_row, path_problem, read_files


def read(path: Path) -> tuple[list[Any], list[str]]:
    rows, _, problems = read_files([str(path)], "--dataset")
    return rows, [str(problem) for problem in problems]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [user("q"), assistant("a")]}, [user("q"), assistant("a")]),
        ({"instruction": "do", "output": "a"}, [user("do"), assistant("a")]),
        ({"instruction": "do", "input": "this", "output": "a"}, [user("do\nthis"), assistant("a")]),
        (
            {"instruction": "do", "output": "a", "system": "s", "history": [["q1", "a1"]]},
            [{"role": "system", "content": "s"}, user("q1"), assistant("a1"), user("do"), assistant("a")],
        ),
        ({"prompt": [user("q")], "completion": [assistant("a")]}, [user("q"), assistant("a")]),
    ],
)
def test_conversations(row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Chat and instruction rows are messages; an input follows its instruction on a line of its own."""
    found = parse_row("f:1", row)

    assert (found.kind, found.messages) == ("chat", messages)


def test_pairs_and_texts() -> None:
    """Both are plain text, without a template."""
    pair, text = parse_row("f:1", {"prompt": "p", "completion": "c"}), parse_row("f:2", {"text": "t"})

    assert (pair.kind, pair.prompt, pair.text) == ("pair", "p", "c")
    assert (text.kind, text.text) == ("text", "t")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, "got a number 3"),
        ([], "got an empty list"),
        ({}, "found the keys none"),
        (
            {"question": "q", "answer": "a"},
            "expected messages, or instruction and output, or prompt and completion, or text; found the keys question, answer",
        ),
        ({"conversations": []}, "rename conversations to messages"),
        ({"messages": "hi"}, "messages: expected a list of messages, got text 'hi'"),
        ({"messages": []}, "messages: expected a list of messages, got an empty list"),
        ({"messages": ["hi"]}, "messages[1]: expected an object with role and content"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[1].role: expected one of system, developer, user, assistant, tool, got 'bot'",
        ),
        ({"messages": [user("q"), {"role": "assistant"}]}, "messages[2].content: expected text, got null"),
        ({"messages": [user("q")]}, "no message of the role assistant"),
        ({"messages": [user("q"), assistant("a")], "tools": "x"}, "tools: expected a list"),
        ({"instruction": "do"}, "output: expected text, got nothing"),
        ({"instruction": "do", "output": 3}, "output: expected text, got a number 3"),
        ({"instruction": "do", "output": "a", "history": ["q"]}, "history[1]: expected a pair"),
        ({"prompt": "p"}, "completion: expected text, got nothing"),
        ({"text": None}, "text: expected text, got null"),
    ],
)
def test_a_bad_row_says_what_was_found_and_expected(row: Any, words: str) -> None:
    """In terms of the row's own keys."""
    with pytest.raises(RowError) as caught:
        parse_row("f:1", row)

    assert words in str(caught.value)


def test_every_bad_line_is_named_in_order(tmp_path: Path) -> None:
    """Broken JSON and wrong rows alike, with file and line; blank lines are nothing."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": }\n{"test": "b"}\n{"text": "c"}\n')

    rows, problems = read(path)

    assert [row.place for row in rows] == [f"{path}:1", f"{path}:5"]
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:3", f"{path}:4"]
    assert "no JSON: Expecting value at column 10" in problems[0]


def test_a_thousand_bad_lines_are_counted(tmp_path: Path) -> None:
    """The first ones are shown."""
    problems = read(tiny.write_jsonl(tmp_path / "rows.jsonl", [{"x": 1}] * 1000))[1]

    assert len(problems) == MOST_PROBLEMS + 1
    assert "980 more rows like these (1000 in all)" in problems[-1]


def test_a_json_list_names_its_rows(tmp_path: Path) -> None:
    """A list has no lines that a reader would count."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": 1}], indent=1))

    rows, problems = read(path)

    assert [row.place for row in rows] == [f"{path}: row 1"]
    assert problems == [f"{path}: row 2: text: expected text, got a number 1"]


def test_a_json_file_of_lines_works_too(tmp_path: Path) -> None:
    """Many tools write JSON lines under .json."""
    assert len(read(tiny.write_jsonl(tmp_path / "rows.json", [{"text": "a"}, {"text": "b"}]))[0]) == 2


def test_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    """Or at every line, where there is no blank one; CRLF and a BOM change nothing."""
    paragraphs, lines = tmp_path / "a.txt", tmp_path / "b.txt"
    paragraphs.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n\r\nthree\r\n")
    lines.write_text("one\ntwo\n")

    assert [(row.place, row.text) for row in read(paragraphs)[0]] == [
        (f"{paragraphs}:1", "one\ntwo"),
        (f"{paragraphs}:5", "three"),
    ]
    assert [row.text for row in read(lines)[0]] == ["one", "two"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "is a folder, expected a file"),
        (lambda path: path.write_bytes(b'{"text": "\xff"}'), "is not UTF-8 at byte 10"),
        (lambda path: path.write_text("\n"), "holds no rows"),
        (lambda path: path.write_text("[" * 100_000), "no JSON"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_file_that_is_none(make: Any, words: str, suffix: str, tmp_path: Path) -> None:
    """One line, no traceback."""
    path = tmp_path / f"rows{suffix}"
    make(path)

    (problem,) = read(path)[1]

    assert words in problem


def test_a_misspelt_file_gets_the_nearest_name(tmp_path: Path) -> None:
    """From its own folder; a folder lists what is in it; other suffixes say what is read."""
    (tmp_path / "tickets.jsonl").write_text("")

    assert f"did you mean {tmp_path / 'tickets.jsonl'}?" in str(path_problem(tmp_path / "tikets.jsonl", "--dataset"))
    assert "give files: tickets.jsonl" in str(path_problem(tmp_path, "--dataset"))
    (tmp_path / "rows.csv").write_text("")
    assert "expected one of .jsonl, .json, .txt, got '.csv'" in str(path_problem(tmp_path / "rows.csv", "--dataset"))
