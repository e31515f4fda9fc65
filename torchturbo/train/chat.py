"""From a conversation to its text and the spans of it that the assistant wrote.

The template decides how a conversation looks; nothing here knows a template. A template with generation markers
(``{% generation %}``) says itself what the assistant wrote. For the others the spans are found by rendering the
conversation up to each assistant turn, which must be a prefix of the whole: that is checked for every row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


class TemplateError(ValueError):
    """The template renders a conversation so that the assistant's part can't be told, or not at all."""


def has_generation_markers(tokenizer: Any) -> bool:
    """Return whether the chat template marks what the assistant writes."""
    template = tokenizer.chat_template
    return isinstance(template, str) and GENERATION_MARKER.search(template) is not None


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
    """Return a conversation as text; ``prompt`` adds what precedes an answer."""
    from jinja2.exceptions import TemplateError as JinjaError

    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt)
        )
    except (JinjaError, TypeError, KeyError, ValueError) as error:
        raise TemplateError(f"the chat template refuses this conversation: {error}") from error


def assistant_spans(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
    """Return the text of a conversation and the character spans of its assistant turns, end-of-turn marks included.

    Raises :class:`TemplateError` where the template renders an earlier turn differently once later ones follow.
    """
    whole = render(tokenizer, messages, tools)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _start(tokenizer, messages[:index], tools, whole)
            end = _end(tokenizer, messages, index, tools, whole, start)
            spans.append((start, start + len(whole[start:end].rstrip())))
    return whole, spans


def _start(tokenizer: Any, before: Sequence[dict[str, Any]], tools: Any, whole: str) -> int:
    """Return where an answer begins: after the text that asks for it.

    A template may ask with more than it later renders (an opened thinking block): what both share is the prompt.
    """
    if not before:
        return 0
    asking = render(tokenizer, before, tools, prompt=True)
    shared = len(os.path.commonprefix([asking, whole]))
    if shared < len(render(tokenizer, before, tools).rstrip()):
        raise TemplateError(
            "the chat template renders the earlier turns differently once an answer follows, so the answer's place"
            " is unknown; use a template with generation markers, or --train_on_prompt true"
        )
    return shared


def _end(tokenizer: Any, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str, start: int) -> int:
    """Return where an answer ends, its end-of-turn mark included."""
    if index == len(messages) - 1:
        return len(whole)
    through = render(tokenizer, messages[: index + 1], tools)
    if whole.startswith(through.rstrip()):
        return len(through)
    # Some templates render the newest answer with more than the earlier ones (Qwen3's empty thinking block). The
    # answer's own words and what closes them are the same in both.
    content = (messages[index].get("content") or "").strip()
    closing = through[through.rfind(content) + len(content) :].rstrip() if content else ""
    at = whole.find(content, start) if content else -1
    if at >= 0 and closing and whole.startswith(closing, at + len(content)):
        return at + len(content) + len(closing)
    raise TemplateError(
        f"the chat template renders answer {index + 1} differently once later turns follow, so its end is unknown;"
        " use a template with generation markers, or --train_on_prompt true"
    )
