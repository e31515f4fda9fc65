"""A plan as text for people: sections of aligned columns, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import torchturbo
from torchturbo.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, paint, width
from torchturbo.errors import Problem, printable
from torchturbo.observe.size import size
from torchturbo.plan.mesh import AXES, ranks_text
from torchturbo.plan.report import Memory, Order, Plan
from torchturbo.plan.sizes import count

WIDTH = 80
TIGHT = 0.9
"""Share of a device's memory above which a plan that fits is said to do so barely: the driver needs some, gaps too."""
SHOWN_UNITS = 4
"""Units whose lists are shown: the first layers of a model; further ones go on in the same way."""


def as_text(plan: Plan) -> str:
    """Return the plan as text; what is wrong stands at its end."""
    sections = [_title(plan), _mesh(plan), _batch(plan), _model(plan), _memory(plan), _prefetch(plan)]
    sections += [_problems("warning", YELLOW, plan.warnings), _problems("error", RED, plan.errors), _missing(plan)]
    return "\n\n".join(section for section in sections if section)


def _title(plan: Plan) -> str:
    many = "s" if plan.world_size > 1 else ""
    title = f"plan for {plan.world_size:,} rank{many}"
    if plan.nodes > 1:
        title += f" on {plan.nodes:,} nodes of {plan.ranks_per_node}"
        if rest := plan.world_size % plan.ranks_per_node:
            title += f" (the last has {rest})"
    found = len(plan.errors)
    verdict = f"{found} error{'s' if found > 1 else ''}" if found else "no errors"
    return f"torchturbo {torchturbo.__version__}: {paint(title, BOLD)}, {paint(verdict, BOLD, RED if found else GREEN)}"


def _mesh(plan: Plan) -> str:
    if plan.axes is None:
        return ""
    rows: list[tuple[str, ...]] = [("axis", "size", "groups", "first group", "spans nodes", "its ranks")]
    rows += [
        (
            axis.name,
            f"{axis.size:,}",
            f"{axis.groups:,}",
            ranks_text(axis.first_group),
            "yes" if axis.spans_nodes else "no",
            AXES[axis.name],
        )
        for axis in plan.axes
        if not axis.name.startswith("ep") or _divides_experts(plan)
    ]
    if plan.nodes == 1:
        rows = [(*row[:4], row[5]) for row in rows]
    return _section("mesh", _columns(rows, right=(1, 2)))


def _divides_experts(plan: Plan) -> bool:
    """Return whether the axes of experts say anything: a dense model has none."""
    return plan.has_experts or any(axis.name == "ep" and axis.size > 1 for axis in plan.axes or ())


def _batch(plan: Plan) -> str:
    batch = plan.batch
    if batch is None:
        return ""
    rows = [
        ("micro-batch", f"{batch.micro_batch:,}", "sequences in one forward of a rank"),
        ("accumulation", f"{batch.accumulation:,}", "micro-batches of a rank in one optimizer step"),
        ("gbs", f"{batch.gbs:,}", f"micro-batches of {_ranks(batch.dp_size)}"),
        ("sequences", f"{batch.sequences:,}", "in one optimizer step"),
    ]
    if plan.length is not None:
        twice = f"; the model runs on {plan.doubled:,}, noisy and clean" if plan.doubled else ""
        tokens = f"in one optimizer step, at most: {plan.length:,} in a sequence{twice}"
        rows.append(("tokens", f"{batch.sequences * plan.length:,}", tokens))
    if plan.steps is not None:
        rows.append(("steps", f"{plan.steps:,}", "of the whole run"))
    return _section("batch", _columns(rows, right=(1,)))


def _ranks(count: int) -> str:
    return f"all {count:,} data-parallel ranks" if count > 1 else "the one data-parallel rank"


def _model(plan: Plan) -> str:
    model = plan.model
    if model is None:
        return ""
    trained = "all of them trained" if model.trained == model.parameters else f"{count(model.trained)} trained"
    text = f"{model.kind}: {count(model.parameters)} parameters, {trained}, {model.layers} layers, {model.precision}"
    return _section("model", [_wrapped(text, "  ")])


def _memory(plan: Plan) -> str:
    memory = plan.memory
    if memory is None:
        return ""
    rows = list(_memory_rows(memory))
    rows.append(("total", size(memory.total) if memory.is_complete else f"> {size(memory.total)}", _verdict(plan)))
    lines = _columns(rows, right=(1,))
    lines[-1] = paint(lines[-1], BOLD, *{True: (GREEN,), False: (RED,), None: ()}[plan.fits])
    return _section("memory of one rank, at most", lines)


def _memory_rows(memory: Memory) -> Iterable[Sequence[str]]:
    state = memory.optimizer
    yield "parameters", size(memory.parameters), ""
    yield "gradients", size(memory.gradients), ""
    spread = f"; {size(state.least)} on the last rank" if state and size(state.least) != size(state.most) else ""
    yield "optimizer state", size(state.most) if state else "?", memory.optimizer_words + spread
    if memory.host.most:
        yield "in host memory", f"-{size(memory.host.most)}", "of these, by cpu_offload"
    if memory.gathered:
        yield "gathered", size(memory.gathered), "whole parameters, while their layers run"
        yield "reducing", size(memory.reducing), "whole gradients of one unit, and their buffer"
    if memory.activations is None:
        yield "activations", "?", memory.reason
    else:
        without = f"; not counted: {memory.left_out}" if memory.left_out else ""
        yield "activations", size(memory.activations), f"estimate: one micro-batch, run without data{without}"
    if memory.mask:
        yield "attention mask", size(memory.mask), memory.mask_words


def _verdict(plan: Plan) -> str:
    memory = plan.memory
    if plan.available is None or memory is None:
        return "give --memory 80GiB to hear whether it fits"
    if plan.fits is None:
        return f"of {size(plan.available)}, with something unknown"
    if not plan.fits:
        return f"does not fit into {size(plan.available)}"
    return f"{'barely fits' if memory.total > TIGHT * plan.available else 'fits'} into {size(plan.available)}"


def _prefetch(plan: Plan) -> str:
    order = plan.order
    if order is None:
        return ""
    lines = [_wrapped(f"{order.strategy}{': ' + order.reason if order.reason else ''}", "  ")]
    shown = _shown(order)
    if shown:
        lines += ["", *_columns([("unit", "asks in forward for", "in backward for"), *shown])]
    return _section("prefetch", lines)


def _shown(order: Order) -> list[Sequence[str]]:
    """Return the lists of the layers in the middle: those at the ends have less to ask for."""
    layers = order.layers
    start = max(0, len(layers) // 2 - 1)
    names = [name for layer in layers[start : start + 2] for name in (layer.name, *layer.experts)][:SHOWN_UNITS]
    rows = [(name, order.lists[name]) for name in names if any(order.lists[name])]
    return [(_short(name), _names(lists.forward), _names(lists.backward)) for name, lists in rows]


def _names(units: Sequence[str]) -> str:
    return ", ".join(map(_short, units)) or "-"


def _short(name: str) -> str:
    """Return a unit's name without what all have in common: ``layer 3``, ``experts 3``."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return name
    return f"{'experts' if len(parts) > at + 1 else 'layer'} {parts[at]}"


def _problems(word: str, colour: str, problems: Sequence[Problem]) -> str:
    indent = " " * (len(word) + 4)
    lines = [
        f"  {paint(f'{word}:', colour)} {_wrapped(printable(str(problem)), indent).lstrip()}" for problem in problems
    ]
    return _section(f"{word}s", lines)


def _missing(plan: Plan) -> str:
    """Return which parts of the plan the errors left nothing to work out from."""
    parts: dict[str, object] = {"mesh": plan.axes, "batch": plan.batch}
    if plan.names_model:
        parts |= {"model": plan.model, "memory": plan.memory}
    names = [name for name, part in parts.items() if part is None]
    if not names or not plan.errors:
        return ""
    return _wrapped(f"not worked out because of the errors: {', '.join(names)}", "")


# ---- layout ----


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([paint(title, BOLD), *lines]) if lines else ""


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return rows in aligned columns; the last column is wrapped under itself, a first row of headings is dim."""
    sizes = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    indent = 2 + sum(sizes) + 2 * len(sizes)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(length) if at in right else cell.ljust(length)
            for at, (cell, length) in enumerate(zip(row, sizes, strict=False))
        ]
        head = "  " + "  ".join(cells) + "  "
        lines.append(head + _wrapped(row[-1], " " * indent).lstrip() if row[-1] else head.rstrip())
    if rows[0][0] in ("axis", "unit"):
        lines[0] = paint(lines[0], DIM)
    return lines


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        min(width(), WIDTH),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
