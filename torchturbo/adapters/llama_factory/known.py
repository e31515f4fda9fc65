"""LLaMA-Factory's arguments held against its own dataclasses: unknown names, and values that are of another type.

LLaMA-Factory tells of unknown names without a place or a near name, and of text in a number's or a switch's place
not at all: ``bf16: "False"`` is on.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchturbo.config.names import did_you_mean
from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.adapters.llama_factory.said import Arguments, Said

LATER: dict[str, str] = {
    "evaluation_strategy": "it is eval_strategy now",
    "train_mm_proj_only": "use freeze_vision_tower and freeze_language_model",
    "use_flash_attn": "use flash_attn: fa2",
}
"""Names of earlier versions, and what to do about them."""


def problems_with(arguments: Arguments, classes: Sequence[type]) -> list[Problem]:
    """Return a problem for each unknown name and each value of a type that its argument does not have."""
    fields = {field.name: (field, kind) for kind in classes for field in dataclasses.fields(kind) if field.init}
    problems = []
    for name, one in arguments.said.items():
        if name not in fields:
            remedy = LATER.get(name, "") or did_you_mean(name, fields, limit=2)
            problems.append(Problem(one.place, "", "LLaMA-Factory has no such argument", remedy))
    if isinstance(arguments.for_framework, list):
        return problems or _refused_by_argparse(arguments.for_framework, classes)
    hints = {kind: typing.get_type_hints(kind) for kind in classes}
    for name, one in arguments.said.items():
        if name in fields and (problem := _mistyped(one, *fields[name], hints)):
            problems.append(problem)
    return problems


def _mistyped(one: Said, field: Any, kind: type, hints: dict[type, dict[str, Any]]) -> Problem | None:
    types = list(_types(hints[kind].get(field.name)))
    value = one.value
    if value is None:
        empty = type(None) not in types and field.default is not None
        return Problem(one.place, "", "expected a value, got nothing", "remove the key") if empty else None
    if not isinstance(value, str) or str in types:
        return None
    got = one.told('string "{}"')
    remedy = "put ${oc.decode:...} around it" if one.filled else "write it without quotes"
    if types and set(types) <= {bool, type(None)}:
        return Problem(one.place, "", f"expected true or false, got {got}", remedy)
    if types and set(types) <= {int, float, type(None)}:
        return Problem(one.place, "", f"expected a number, got {got}", remedy)
    return None


def _types(hint: Any) -> Iterator[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for part in typing.get_args(hint):
            yield from _types(part)
    else:
        yield hint


def _refused_by_argparse(words: list[str], classes: Sequence[type]) -> list[Problem]:
    """Return what LLaMA-Factory's own parser would end the program for after printing the help of every argument."""
    from torchturbo.adapters.hf_parser import ReportingParser, parse_all

    return parse_all(ReportingParser(classes), words)[2]
