"""The choice of an implementation for every operator of a model, what it says about it, and its installation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from torchturbo.objectives.diffusion.models import is_diffusion_model
from torchturbo.ops import registry, shapes, switches
from torchturbo.ops.find import Found, Site, find
from torchturbo.ops.registry import NATIVE, OPS, Implementation
from torchturbo.ops.replace import Handle, remove_all

if TYPE_CHECKING:
    from torchturbo.ops.registry import Device

AUTO, CUSTOM = "auto", "custom"
WIDTH = 98
"""Columns of the table, without its indentation."""


@dataclass(frozen=True)
class Situation:
    """What a choice depends on besides the model's structure."""

    base: Any
    """The Transformers model (inside PEFT's, where there is one)."""
    runtime: Device
    dtype: str
    """torch's name of the format that the model computes in."""
    deterministic: bool = False
    chunked_loss: bool = False
    """Whether the loss is computed in chunks, which takes the cross-entropy's place."""


@dataclass(frozen=True)
class Choice:
    """What one operator of a model gets."""

    op: str
    name: str
    """The implementation's, or the model's own where it is kept."""
    sites: Sequence[Site]
    implementation: Implementation | None = None
    """What is to be installed; None leaves the model as it is."""
    reasons: tuple[str, ...] = ()
    """Why it isn't a better one."""
    optimised: bool = True
    """Whether it is more than plain PyTorch."""
    commands: tuple[str, ...] = ()
    """What would install the better ones."""


def choose(found: Found, situation: Situation, policy: str) -> list[Choice]:
    """Return what each operator gets that the model has, in the table's order."""
    return [_choice(op, found, situation, policy) for op in OPS if found.of(op) or op in found.unproven]


def _choice(op: str, found: Found, situation: Situation, policy: str) -> Choice:
    sites = found.of(op)
    unproven = tuple(found.unproven.get(op, ()))
    if not sites:
        return Choice(op, NATIVE, sites, reasons=unproven)
    if op == "cross_entropy" and situation.chunked_loss:
        return Choice(op, "chunked loss", sites, reasons=("loss_chunk computes it together with the head",))
    own, eager = _own(op, sites, situation)
    reasons: list[str] = []
    commands: list[str] = []
    for row in registry.of(op):
        if row.name == NATIVE:
            break
        if row.name == own:
            return Choice(op, f"{own}, as the model has it", sites, reasons=(*reasons, *unproven))
        refusal = _refusal(row, situation, policy, own)
        if refusal is None:
            return Choice(op, row.name, sites, row, (*reasons, *unproven))
        if situation.runtime.device_type in row.devices:
            reasons.append(f"{row.name}: {refusal}")
            if row.command and row.refusal(situation.runtime, situation.dtype) is not None:
                commands.append(row.command)
    name = NATIVE if own in ("", "eager") else f"{own}, as the model has it"
    return Choice(op, name, sites, None, (*reasons, *unproven), not eager, tuple(dict.fromkeys(commands)))


def _own(op: str, sites: Sequence[Site], situation: Situation) -> tuple[str, bool]:
    """Return which of Transformers' implementations a model has already, and whether that is the plain one."""
    name = {"attention": "_attn_implementation", "grouped_mm": "_experts_implementation"}.get(op)
    if name is None:
        return "", True
    names = [str(getattr(site.module.config, name) or "eager") for site in sites]
    own = next((name for name in names if name != "eager"), "eager")  # a part of a model may know the plain one alone
    if op == "grouped_mm" and own == "grouped_mm" and situation.dtype != "float32":
        return "", True  # Transformers' function multiplies outside autocast: ours is another one
    return own, own == "eager"


def _refusal(row: Implementation, situation: Situation, policy: str, own: str) -> str | None:
    """Return why a row isn't taken for this model under this policy."""
    refusal = row.refusal(situation.runtime, situation.dtype, deterministic=situation.deterministic)
    if refusal is not None:
        return refusal
    if row.held_back and policy == AUTO:
        return row.held_back
    if row.op in ("attention", "grouped_mm") and own not in ("", "sdpa", "grouped_mm"):
        if own != "eager":
            return f"the model was given {own}"
        if policy == AUTO:
            return "the model was given eager"
    return _unsupported(row, situation) if row.op == "attention" else None


def _unsupported(row: Implementation, situation: Situation) -> str | None:
    """Return why the model's class can't take an attention implementation."""
    base = situation.base
    if row.name != "sdpa" and is_diffusion_model(base):
        return "it can't express the mask of block diffusion"
    name = "flash_attention_2" if row.name != "sdpa" else row.name
    try:
        if not base._can_set_attn_implementation():
            return f"{type(base).__name__} can't change its attention"
        base.get_correct_attn_implementation(name)
    except Exception as error:  # Transformers raises ImportError and ValueError, device libraries what they like
        return " ".join(str(error).split())[:160]
    return None


def missing(choices: Sequence[Choice], device: str) -> list[tuple[str, str]]:
    """Return what an insisting policy lacks: for each operator a message and a remedy."""
    lacking = []
    for choice in choices:
        if choice.sites and choice.implementation is None and not choice.optimised:
            message = (
                f"no optimised {choice.op} for this run: {'; '.join(choice.reasons) or f'there is none for {device}'}"
            )
            remedy = f"install it: {', or '.join(choice.commands)}" if choice.commands else f"set it to {AUTO}"
            lacking.append((message, remedy))
    return lacking


def table(choices: Sequence[Choice], situation: Situation, policy: str) -> str:
    """Return the table of a choice: operator, implementation, number of modules, and notes why not a better one.

    Operators share reasons, such as a package that is not installed: each stands once, below the table.
    """
    notes = list(dict.fromkeys(reason for choice in choices for reason in choice.reasons))
    rows = [("operator", "implementation", "modules", "why not another")]
    for choice in choices:
        numbers = ", ".join(str(notes.index(reason) + 1) for reason in choice.reasons)
        rows.append((choice.op, choice.name, str(len(choice.sites)), f"note {numbers}" if numbers else "-"))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].rjust(widths[2]), row[3]]) for row in rows
    ]
    head = f"operators ({policy}, {situation.runtime.device_type}, {situation.dtype})"
    lines += [line for at, note in enumerate(notes, 1) for line in _noted(f"note {at}: ", note)]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _noted(title: str, text: str) -> list[str]:
    """Return a note below the table, wrapped under itself; paths and commands stay whole."""
    return textwrap.wrap(
        title + text, WIDTH, subsequent_indent=" " * len(title), break_long_words=False, break_on_hyphens=False
    )


INSTALLED: WeakKeyDictionary[nn.Module, list[Handle]] = WeakKeyDictionary()
"""What undoes the installations, by model."""


def install(choices: Sequence[Choice], situation: Situation) -> None:
    """Put the chosen implementations into the model; :func:`remove` takes them out."""
    handles = INSTALLED.setdefault(situation.base, [])
    for choice in choices:
        if choice.implementation is not None:
            handles += choice.implementation.load()(choice.sites, situation)


def remove(base: nn.Module) -> None:
    """Put a model back as Transformers wrote it: its modules' own dictionaries are as they were before.

    A copy of a model that had implementations installed has them, too, and loses them here as well.
    """
    remove_all(INSTALLED.pop(base, ()))
    shapes.forget(base)
    switches.forget(base)


def plan(situation: Situation, policy: str) -> list[Choice]:
    """Look through a model and choose; nothing of it is changed."""
    found = find(situation.base)
    if getattr(situation.base, "use_kernels", False):
        reason = "the model uses kernels of the Hub (use_kernels)"
        names = {site.op for site in found.sites} - {"attention", "grouped_mm", "cross_entropy"}
        found.sites = [site for site in found.sites if site.op not in names]
        found.unproven.update({op: [reason] for op in names})
    return choose(found, situation, policy)
