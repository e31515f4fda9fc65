"""Masks: what the assistant wrote is trained on and nothing else, for every kind of template."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from torchturbo.train.chat import TemplateError
from torchturbo.train.examples import Encoder
from torchturbo.train.rows import parse_row

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: the newest answer gets an empty thinking block, earlier ones do not.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-R1's: it asks with an opened thinking block that it does not render later.
OPENED = tiny.CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
# Numbers the turns from the end: every earlier turn changes with each later one.
BROKEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + (loop.revindex | string) + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RAISING = "{{ raise_exception('only one system message') }}"


def targets(template: str, row: dict[str, Any], **changes: Any) -> list[str]:
    """Return the stretches of text that are trained on."""
    tokenizer = tiny.tokenizer(template)
    example = Encoder(tokenizer, **({"cutoff_len": 999, "train_on_prompt": False} | changes)).encode(
        parse_row("f:1", row)
    )
    stretches: list[list[int]] = []
    before = -100
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            if before == -100:
                stretches.append([])
            stretches[-1].append(token)
        before = label
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED, OPENED], ids=["plain", "marked", "opened"])
def test_the_answers_and_their_ends_are_trained_on(template: str) -> None:
    """Every assistant turn of a conversation, with the mark that ends it."""
    row = tiny.chat("hello there", "fine, thanks", "how are you", "seven", system="box")

    assert targets(template, row) == ["fine, thanks<|im_end|>", "seven<|im_end|>"]


def test_a_thinking_block_of_the_last_answer():  # type: ignore[no-untyped-def]
    """It belongs to the answer it stands in, and earlier answers end where they end."""
    row = tiny.chat("hello", "one", "again", "two", "and", "three")

    assert targets(THINKING, row) == ["one<|im_end|>", "two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"]


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
def test_the_prompt_too_where_asked(template: str) -> None:
    """All but the first token, which follows nothing."""
    (text,) = targets(template, tiny.chat("hello", "one"), train_on_prompt=True)

    assert text == "user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"


def test_answers_that_repeat_the_question_are_told_apart() -> None:
    """Spans come from rendering, not from looking for the words."""
    assert targets(tiny.CHATML, tiny.chat("one", "one", "one", "one")) == ["one<|im_end|>", "one<|im_end|>"]


@pytest.mark.parametrize("answer", ["", " spaced ", "line\nbreak", "ünï ✓"])
def test_any_answer_is_covered(answer: str) -> None:
    """Empty ones train the end alone."""
    assert targets(tiny.CHATML, tiny.chat("q", answer)) == [f"{answer}<|im_end|>"]


def test_a_template_that_breaks_the_prefix_is_named() -> None:
    """Rather than a mask that is silently wrong."""
    with pytest.raises(TemplateError, match="renders the earlier turns differently"):
        targets(BROKEN, tiny.chat("one", "two", "three", "four"))
    assert targets(BROKEN, tiny.chat("one", "two"), train_on_prompt=True)


def test_a_template_that_refuses_says_why() -> None:
    """With the template's own words."""
    with pytest.raises(TemplateError, match="only one system message"):
        targets(RAISING, tiny.chat("one", "two"))


def test_pairs_are_masked_at_the_completion() -> None:
    """And end with the end-of-text token."""
    assert targets(tiny.CHATML, {"prompt": "the capital of France is ", "completion": "Paris"}) == ["Paris<|im_end|>"]
    assert targets(tiny.CHATML, {"prompt": "ab", "completion": "cd"}, train_on_prompt=True) == ["bcd<|im_end|>"]


def test_texts_are_trained_on_whole() -> None:
    """All but the first token."""
    tokenizer = tiny.tokenizer()
    first = tokenizer.decode(tokenizer("hello there")["input_ids"][:1])

    assert targets(tiny.CHATML, {"text": "hello there"}) == ["hello there".removeprefix(first) + "<|im_end|>"]


def test_long_rows_are_cut_and_empty_ones_left_out() -> None:
    """Both are counted; what was cut off may have been all there was to train on."""
    rows = [
        parse_row(f"f:{at}", row)
        for at, row in enumerate([tiny.chat("q", "one two three four five"), tiny.chat("why " * 40, "a")])
    ]

    examples, tally = Encoder(tiny.tokenizer(), cutoff_len=25, train_on_prompt=False).encode_all(rows)

    assert (len(examples), tally.rows, tally.cut, tally.without_target) == (1, 2, 2, 1)
    assert len(examples[0]["input_ids"]) == len(examples[0]["labels"]) == 25
    assert tally.tokens == 25
    assert tally.targets == sum(label != -100 for label in examples[0]["labels"])


def test_every_row_a_template_refuses_is_named() -> None:
    """Up to a limit, with the count."""
    rows = [parse_row(f"f:{at}", tiny.chat("a", "b", "c", "d")) for at in range(50)]

    examples, tally = Encoder(tiny.tokenizer(BROKEN), cutoff_len=99, train_on_prompt=False).encode_all(rows)

    assert examples == []
    assert [problem.place for problem in tally.problems[:2]] == ["f:0", "f:1"]
    assert "30 more rows like these" in str(tally.problems[-1])
