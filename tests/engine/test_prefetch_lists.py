"""Prefetch as data: what each unit gathers ahead, as tables, and what ``auto`` chooses; no model, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchturbo.engine.backends.fsdp2.auto import choose_strategy
from torchturbo.engine.backends.fsdp2.prefetch import Layer, Prefetch, prefetch_lists


def layers(pattern: str, stack: str = "") -> list[Layer]:
    """Return layers: ``d`` for a dense one, ``m`` for one with experts, ``2`` for one with two sets of them."""
    experts = {"d": "", "m": "E{}", "2": "E{}a E{}b"}
    return [
        Layer(f"{stack}L{at}", tuple((stack + one).format(at) for one in experts[kind].split()), stack)
        for at, kind in enumerate(pattern)
    ]


def table(pattern: str, strategy: str, forward: int = 1, backward: int = 1, direction: str = "forward_backward") -> str:
    """Return the units that have lists: a line each, forward list | backward list."""
    lists = prefetch_lists(layers(pattern), strategy, direction, forward, backward)
    lines = [f"{name}: {' '.join(one.forward)} | {' '.join(one.backward)}" for name, one in lists.items() if any(one)]
    return "\n".join(line.rstrip() for line in lines)


WITH_LAYER_1 = """
L0: E0 L1 E1 | E0
L1: E1 L2 E2 | E1 L0 E0
L2: E2 L3 E3 | E2 L1 E1
L3: E3 | E3 L2 E2
"""
WITH_LAYER_2_1 = """
L0: E0 L1 E1 L2 E2 | E0
L1: E1 L2 E2 L3 E3 | E1 L0 E0
L2: E2 L3 E3 | E2 L1 E1
L3: E3 | E3 L2 E2
"""
LOOKAHEAD_1 = """
L0: E0 L1 | E0
E0: E1 |
L1: E1 L2 | E1 L0
E1: E2 | E0
L2: E2 L3 | E2 L1
E2: E3 | E1
L3: E3 | E3 L2
E3:  | E2
"""
LOOKAHEAD_2 = """
L0: E0 L1 E1 L2 | E0
E0: E2 |
L1: E1 L2 E2 L3 | E1 L0 E0
E1: E3 |
L2: E2 L3 E3 | E2 L1 E1 L0
E2:  | E0
L3: E3 | E3 L2 E2 L1
E3:  | E1
"""
DENSE_2 = """
L0: L1 L2 |
L1: L2 L3 | L0
L2: L3 | L1
L3:  | L2
"""
MIXED_LOOKAHEAD_1 = """
L0: L1 |
L1: L2 E2 | L0
L2: E2 L3 | E2 L1
E2: E3 |
L3: E3 | E3 L2
E3:  | E2
"""
BETWEEN_LOOKAHEAD_1 = """
L0: E0 L1 | E0
L1: L2 E2 | L0 E0
L2: E2 | E2 L1
"""
TWO_SETS_LOOKAHEAD_1 = """
L0: E0a E0b L1 | E0b E0a
E0a: E1a E1b |
L1: E1a E1b | E1b E1a L0
E1b:  | E0b E0a
"""
FORWARD_ONLY = """
L0: E0 L1 E1 |
L1: E1 |
"""


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("", ("mmmm", "native", 3, 3)),
        (WITH_LAYER_1, ("mmmm", "expert_with_layer")),
        (WITH_LAYER_2_1, ("mmmm", "expert_with_layer", 2, 1)),
        (LOOKAHEAD_1, ("mmmm", "expert_lookahead")),
        (LOOKAHEAD_2, ("mmmm", "expert_lookahead", 2, 2)),
        (DENSE_2, ("dddd", "expert_with_layer", 2, 1)),
        (DENSE_2, ("dddd", "expert_lookahead", 2, 1)),
        (MIXED_LOOKAHEAD_1, ("ddmm", "expert_lookahead")),
        (BETWEEN_LOOKAHEAD_1, ("mdm", "expert_lookahead")),
        (TWO_SETS_LOOKAHEAD_1, ("22", "expert_lookahead")),
        (FORWARD_ONLY, ("mm", "expert_with_layer", 1, 9, "forward")),
        ("L0: E0 | E0", ("m", "expert_with_layer", 2, 2)),
        ("", ("d", "expert_with_layer", 2, 2)),
        ("", ("", "expert_lookahead", 1, 1)),
    ],
)
def test_the_lists(expected: str, arguments: tuple[str, str]) -> None:
    """Written out: the layer's own experts first; backward, the mirror image, the last set of experts first."""
    assert expected.strip() == table(*arguments)


@pytest.mark.parametrize("strategy", ["expert_with_layer", "expert_lookahead"])
@pytest.mark.parametrize("depth", [1, 2, 3, 7])
@pytest.mark.parametrize("pattern", ["mmmmm", "ddmmm", "mdmdm", "2m2d2"])
def test_every_unit_is_asked_for_in_time(pattern: str, depth: int, strategy: str) -> None:
    """Whatever the pattern: walked through in order, each unit but the first has been asked for before it is reached.

    And by no layer further away than the depth.
    """
    units = [name for layer in layers(pattern) for name in (layer.name, *layer.experts)]
    lists = prefetch_lists(layers(pattern), strategy, "forward_backward", depth, depth)
    assert units == list(lists)
    for walk, way in ((units, "forward"), (_backward_order(pattern), "backward")):
        asked: set[str] = set()
        for unit in walk:
            assert unit in asked or unit == walk[0]
            targets = getattr(lists[unit], way)
            assert len(targets) == len(set(targets))
            assert all(abs(_layer(unit) - _layer(target)) <= depth for target in targets)
            asked |= set(targets)


def _backward_order(pattern: str) -> list[str]:
    """A layer is reached before its experts in backward too: its hook waits for its output's gradient."""
    return [name for layer in reversed(layers(pattern)) for name in (layer.name, *reversed(layer.experts))]


def _layer(unit: str) -> int:
    return int(unit.strip("LEab"))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lookahead_holds_one_set_of_experts_fewer_in_attention(depth: int) -> None:
    """That is what it is for, in the middle of a model: attention is computed between a layer's list and its experts'.

    Units are freed after use, so what is held then is what was asked for and not used yet.
    """
    held = {}
    for strategy in ("expert_with_layer", "expert_lookahead"):
        lists = prefetch_lists(layers("m" * 9), strategy, "forward", depth, 1)
        units = [name for layer in layers("m" * 9) for name in (layer.name, *layer.experts)]
        before = units[: units.index("L4") + 1]
        asked = {target for unit in before for target in lists[unit].forward}
        held[strategy] = {unit for unit in asked - set(before) if unit.startswith("E")}

    assert {f"E{4 + depth}"} == held["expert_with_layer"] - held["expert_lookahead"]
    assert not held["expert_lookahead"] - held["expert_with_layer"]


def test_a_stack_asks_for_nothing_of_the_next() -> None:
    """A batch without images runs no vision tower: what was gathered for it would be stale at its next use."""
    both = [*layers("dd", "vision"), *layers("dm", "text")]

    lists = prefetch_lists(both, "expert_with_layer", "forward_backward", 5, 5)

    assert Prefetch((), ("visionL0",)) == lists["visionL1"]
    assert Prefetch(("textL1", "textE1"), ()) == lists["textL0"]


@pytest.mark.parametrize(
    ("strategy", "words", "facts"),
    [
        ("native", "own order", {"depth": 1, "ep_size": 1, "expert_bytes": 0}),
        ("native", "own order", {"depth": 1, "ep_size": 1, "expert_bytes": 99 << 20}),
        ("expert_with_layer", "depth of 2", {"depth": 2, "ep_size": 1, "expert_bytes": 0}),
        ("expert_with_layer", "dense: layers only", {"depth": 2, "ep_size": 1, "expert_bytes": 0}),
        ("expert_lookahead", "depth of 2", {"depth": 2, "ep_size": 1, "expert_bytes": 11 << 20}),
        ("expert_with_layer", "routing", {"depth": 1, "ep_size": 2, "expert_bytes": 10 << 20}),
        ("expert_with_layer", "10 MiB of experts, 10 MiB else", {"depth": 1, "ep_size": 2, "expert_bytes": 10 << 20}),
        ("expert_with_layer", "experts stay whole", {"depth": 1, "ep_size": 8, "expert_bytes": 0}),
        ("expert_lookahead", "routing", {"depth": 1, "ep_size": 2, "expert_bytes": 11 << 20}),
        ("expert_lookahead", "11 MiB of experts, 10 MiB else", {"depth": 1, "ep_size": 2, "expert_bytes": 11 << 20}),
    ],
)  # fmt: skip
def test_auto_chooses_and_says_why(strategy: str, words: str, facts: dict[str, int]) -> None:
    """By the layout alone: expert parallelism, the depths asked for, and which part of a layer is the larger one."""
    choice = choose_strategy(**facts, other_bytes=10 << 20)

    assert strategy == choice.strategy
    assert words in choice.reason
    assert len(f"prefetch: auto chose {choice.strategy}: {choice.reason}") <= 115


def test_the_lists_need_no_torch() -> None:
    """A plan is made before anything is launched."""
    modules = "torchturbo.engine.backends.fsdp2.prefetch, torchturbo.engine.backends.fsdp2.auto"
    code = f"import sys, {modules}; print('torch' in sys.modules)"

    assert "False" == subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path.cwd()).strip()
