"""From rows to token ids and labels: the prompt is masked, long rows are cut, rows without a target are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from torchturbo.errors import Problem
from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.train.chat import Span, TemplateError, assistant_spans, has_generation_markers, render
from torchturbo.train.rows import MOST_PROBLEMS, Row

Example = dict[str, list[int]]
"""``input_ids`` and ``labels`` of one row, of one length; the label of a position is the token at it, or -100."""


@dataclass
class Tally:
    """What happened to the rows, for the line that says so."""

    rows: int = 0
    cut: int = 0
    without_target: int = 0
    tokens: int = 0
    targets: int = 0
    problems: list[Problem] = field(default_factory=list)


class Examples(Dataset[Example]):
    """Tokenised rows in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


class Encoder:
    """Turns rows into examples with one tokenizer.

    Parameters
    ----------
    tokenizer
        A fast tokenizer: the spans of a conversation are found in its text, so offsets are needed.
    cutoff_len
        Longest example in tokens; what is beyond is cut from the end.
    train_on_prompt
        Whether the prompt's tokens are targets too.

    """

    def __init__(self, tokenizer: Any, *, cutoff_len: int, train_on_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.cutoff_len = cutoff_len
        self.train_on_prompt = train_on_prompt
        self.marked = has_generation_markers(tokenizer)

    def encode_all(self, rows: Iterable[Row]) -> tuple[list[Example], Tally]:
        """Encode rows in order; what can't be encoded becomes a problem with the row's place."""
        tally = Tally()
        examples = []
        for row in rows:
            tally.rows += 1
            try:
                example = self.encode(row)
            except TemplateError as error:
                tally.problems.append(Problem(row.place, "", str(error)))
                continue
            if len(example["input_ids"]) > self.cutoff_len:
                tally.cut += 1
                example = {name: values[: self.cutoff_len] for name, values in example.items()}
            targets = sum(label != IGNORE_INDEX for label in example["labels"])
            if not targets:
                tally.without_target += 1
                continue
            tally.tokens += len(example["input_ids"])
            tally.targets += targets
            examples.append(example)
        if len(tally.problems) > MOST_PROBLEMS:
            more = len(tally.problems) - MOST_PROBLEMS
            tally.problems = [*tally.problems[:MOST_PROBLEMS], Problem("", "", f"{more} more rows like these")]
        return examples, tally

    def encode(self, row: Row) -> Example:
        """Return one row's tokens and labels, uncut."""
        if row.kind == "text":
            ids = self._closed(self.tokenizer(row.text)["input_ids"])
            return _example(ids, [True] * len(ids))
        if row.kind == "pair":
            return self._pair(row)
        if self.marked and not self.train_on_prompt:
            return self._marked_chat(row)
        return self._chat(row)

    def _pair(self, row: Row) -> Example:
        """Encode prompt and completion as one text, so that no token boundary is forced between them."""
        encoded = self.tokenizer(row.prompt + row.text, return_offsets_mapping=True)
        ids = self._closed(encoded["input_ids"])
        offsets = [*encoded["offset_mapping"], (len(row.prompt + row.text) + 1,) * 2][: len(ids)]
        targets = [end > len(row.prompt) for _, end in offsets]
        return _example(ids, [True] * len(ids) if self.train_on_prompt else targets)

    def _chat(self, row: Row) -> Example:
        spans: list[Span] = []
        if self.train_on_prompt:
            text = render(self.tokenizer, row.messages, row.tools)
        else:
            text, spans = assistant_spans(self.tokenizer, row.messages, row.tools)
        # The template has written the special tokens already.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if self.train_on_prompt:
            return _example(ids, [True] * len(ids))
        return _example(ids, [_inside(offset, spans) for offset in encoded["offset_mapping"]])

    def _marked_chat(self, row: Row) -> Example:
        try:
            encoded = self.tokenizer.apply_chat_template(
                row.messages, tools=row.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # the template's own errors, of any kind
            raise TemplateError(f"the chat template refuses this conversation: {error}") from error
        return _example(list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]])

    def _closed(self, ids: list[int]) -> list[int]:
        """Return a document's tokens with its end marked, so that the model learns to stop."""
        end = self.tokenizer.eos_token_id
        return list(ids) if end is None or (ids and ids[-1] == end) else [*ids, end]


def _example(ids: list[int], targets: list[bool]) -> Example:
    # The first token follows nothing (or, packed, another document): it is never a target.
    labels = [
        token if target and at else IGNORE_INDEX for at, (token, target) in enumerate(zip(ids, targets, strict=True))
    ]
    return {"input_ids": ids, "labels": labels}


def _inside(offset: tuple[int, int], spans: Sequence[Span]) -> bool:
    """Return whether a token ends inside a span; one that reaches over the border belongs to what it ends in."""
    start, end = offset
    return end > start and any(first < end <= last for first, last in spans)
