"""Real all-gathers on two ranks: which are asked for when, by strategy; each unit's once a pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import launching
import parity
import pytest
import tiny
from gathers import traced
from ranks import run_ranks

from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.engine.steps.prefetch import gathered_bytes

Model = tuple[str, dict[str, Any]]
Case = tuple[Model, Any]

MOE: Model = ("qwen3_moe", {"num_hidden_layers": 4})
MIXED: Model = ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0]})
DENSE: Model = ("qwen3", {"num_hidden_layers": 4})


def made(model: Model) -> Any:
    return tiny.model(model[0], **model[1])


def passes(rank: int, cases: Iterable[Case]) -> list[tuple[str, str]]:
    """Return what each case gathers in the forward and the backward pass of its second step."""
    found = []
    for kind, settings in cases:
        model = made(kind)
        names = {"": "root", "model.embed_tokens": "embed"}
        names |= {f"model.layers.{at}": f"L{at}" for at in range(9)}
        names |= {f"model.layers.{at}.mlp.experts": f"E{at}" for at in range(9)}
        engine = parity.prepared(model, settings, 2, rank)
        window = parity.batches(1)
        for _ in range(2):
            engine.context.normaliser.open_window(window, "cpu")
            with engine.context.normaliser.applied():
                with traced(names) as forward:
                    loss = model(**window[0]).loss
                with traced(names) as backward:
                    loss.backward()
        found.append((str(forward), str(backward)))
    return found


def settings(
    strategy: str = "native", *, checkpointing: Any = None, reshard: bool = True, ep_size: int = 1, **keys: Any
) -> Any:
    backend = {"prefetch_strategy": strategy, "reshard_after_forward": reshard, **keys}
    recompute = {"enabled": checkpointing is not None}
    if checkpointing is not None:
        recompute["use_reentrant"] = checkpointing
    return parity.config(backend_config=backend, activation_checkpointing=recompute, parallel_plan={"ep_size": ep_size})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FORWARD, BACKWARD = 0, 1
BY_STRATEGY: list[tuple[tuple[Model, dict[str, Any]], str, str]] = [
    (
        (MOE, {"strategy": "native"}),
        "root: root | embed: embed | L0: L0 | E0: E0 | L1: L1 | E1: E1 | L2: L2 | E2: E2 | L3: L3 | E3: E3",
        "root: L3 | L3: E3 | E3: L2 | L2: E2 | E2: L1 | L1: E1 | E1: L0 | L0: E0 | E0: embed",
    ),
    (
        (MOE, {"strategy": "expert_with_layer"}),
        "root: root | embed: embed | L0: L0 E0 L1 E1 | L1: L2 E2 | L2: L3 E3",
        "root: L3 | L3: E3 L2 E2 | L2: L1 E1 | L1: L0 E0 | E0: embed",
    ),
    (
        (MOE, {"strategy": "expert_lookahead"}),
        "root: root | embed: embed | L0: L0 E0 L1 | E0: E1 | L1: L2 | E1: E2 | L2: L3 | E2: E3",
        "root: L3 | L3: E3 L2 | E3: E2 | L2: L1 | E2: E1 | L1: L0 | E1: E0 | E0: embed",
    ),
    (
        (MOE, {"strategy": "expert_lookahead", "forward_prefetch_depth": 2, "backward_prefetch_depth": 3}),
        "root: root | embed: embed | L0: L0 E0 L1 E1 L2 | E0: E2 | L1: L3 | E1: E3",
        "root: L3 | L3: E3 L2 E2 L1 E1 L0 | E3: E0 | E0: embed",
    ),
    (
        (MOE, {"strategy": "expert_with_layer", "prefetch_direction": "forward", "forward_prefetch_depth": 2}),
        "root: root | embed: embed | L0: L0 E0 L1 E1 L2 E2 | L1: L3 E3",
        "root: L3 | L3: E3 | E3: L2 | L2: E2 | E2: L1 | L1: E1 | E1: L0 | L0: E0 | E0: embed",
    ),
    (
        (MIXED, {"strategy": "expert_lookahead"}),
        "root: root | embed: embed | L0: L0 L1 E1 | L1: L2 | E1: E2 | L2: L3 | E2: E3",
        "root: L3 | L3: E3 L2 | E3: E2 | L2: L1 | E2: E1 | L1: L0 | L0: embed",
    ),
    (
        (MOE, {"strategy": "auto", "ep_size": 2}),  # experts that no rank has to gather are not asked for ahead
        "root: root | embed: embed | L0: L0 L1 | E0: E0 | L1: L2 | E1: E1 | L2: L3 | E2: E2 | E3: E3",
        "root: L3 | L3: L2 | E3: E3 | L2: L1 | E2: E2 | L1: L0 | E1: E1 | L0: E0 | E0: embed",
    ),
    (
        (DENSE, {"strategy": "auto", "forward_prefetch_depth": 2}),
        "root: root | embed: embed | L0: L0 L1 L2 | L1: L3",
        "root: L3 | L3: L2 | L2: L1 | L1: L0 | L0: embed",
    ),
]


def test_gathers_are_asked_for_as_the_strategy_says() -> None:
    """Read a line as: when layer 0 is reached, these are gathered. The last layer's gather is FSDP2's own doing."""
    cases = [(model, settings(**keys)) for (model, keys), *_ in BY_STRATEGY]

    for found in run_ranks(2, passes, cases):
        assert [(forward, backward) for _, forward, backward in BY_STRATEGY] == found


@pytest.mark.parametrize("strategy", ["native", "expert_with_layer", "expert_lookahead"])
def test_each_unit_is_gathered_once_a_pass(strategy: str) -> None:
    """Activation checkpointing changes nothing: what runs forward again within backward gathers nothing ahead.

    Gathered parameters that are kept for backward are not gathered again.
    """
    depths: dict[str, Any] = {"forward_prefetch_depth": 2, "backward_prefetch_depth": 2}
    cases = [
        (MOE, settings(strategy, checkpointing=checkpointing, reshard=reshard, **depths))
        for reshard in (True, False)
        for checkpointing in (None, True, False)
    ]
    units = sorted([*(f"{kind}{at}" for kind in "LE" for at in range(4)), "embed"])

    for found in run_ranks(2, passes, cases):
        forward, backward = zip(*found, strict=True)
        assert len(set(forward)) == 1
        assert sorted(["root", *units]) == gathered(forward[0])
        assert [units] * 3 == [gathered(one) for one in backward[:3]]
        # Before 5.24 Transformers recomputed a layer's hooks too, so that the reentrant kind reaches experts first.
        assert backward[0] == backward[2]
        assert {""} == set(backward[3:])


def gathered(text: str) -> list[str]:
    return sorted(name for line in text.split(" | ") for name in line.partition(": ")[2].split())


def parity_of(rank: int, cases: list[Any]) -> None:
    for case in cases:
        parity.check(rank, 2, lambda: made(MOE), case, parity.batches(2))


def test_gradients_do_not_depend_on_it() -> None:
    """Nothing is used before it has arrived, and nothing that is stale."""
    depths: dict[str, Any] = {"forward_prefetch_depth": 2, "backward_prefetch_depth": 2}
    run_ranks(2, parity_of, [settings("expert_lookahead", checkpointing=False, **depths), settings("native")])


def prepared_twice(rank: int, first: Any, second: Any) -> tuple[str, str, int]:
    model = made(MOE)
    parity.prepared(model, first, 2, rank)
    parity.prepared(model, second, 2, rank)
    layer = model.model.layers[0]
    return _lists(layer), _lists(layer.mlp.experts), len(layer._forward_pre_hooks)


def said(rank: int, cases: list[Case]) -> list[str]:
    with launching.said() as lines:
        for model, configuration in cases:
            parity.prepared(made(model), configuration, 2, rank)
    return [line for line in lines if "prefetch" in line]


def test_a_line_says_what_was_chosen_and_why() -> None:
    """On rank 0: the choice of ``auto``, and what an explicit strategy comes to where it can't be had as asked for."""
    one: Model = ("qwen3_moe", {"num_hidden_layers": 1})
    cases = {
        "prefetch: auto chose native: without expert parallelism": (MOE, settings("auto")),
        "prefetch: auto chose expert_lookahead: a depth of 2": (MOE, settings("auto", forward_prefetch_depth=2)),
        "prefetch: auto chose expert_with_layer: layers wait for routing; experts stay whole on their ranks": (
            MOE,
            settings("auto", ep_size=2),
        ),
        "prefetch: auto chose expert_with_layer: a depth of 2": (DENSE, settings("auto", backward_prefetch_depth=2)),
        "prefetch: expert_lookahead gathers layers ahead; the model has no": (DENSE, settings("expert_lookahead")),
        "no prefetch: the model has fewer than two layers": (one, settings("auto")),
    }
    # Without expert parallelism, a depth that no direction uses leaves auto with FSDP2's own order.
    idle = settings("auto", backward_prefetch_depth=2, prefetch_direction="forward")

    first, second = run_ranks(2, said, [*cases.values(), (MOE, idle)])
    assert len(cases) + 1 == len(first)
    assert all(line.startswith(start) for line, start in zip(first, [*cases, next(iter(cases))], strict=True))
    assert not second


@pytest.mark.parametrize("strategy", ["auto", "native", "expert_lookahead"])
def test_nothing_sharded_leaves_nothing_to_gather(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who asked for a strategy by its name hears of it; with the default it is no news."""
    parity.prepared(tiny.model(), settings(strategy))

    line = "[torchturbo] WARNING no prefetch: nothing is sharded (backend_config.prefetch_strategy: expert_lookahead)"
    assert [line] * (strategy == "expert_lookahead") == [
        line for line in capsys.readouterr().err.splitlines() if "prefetch" in line
    ]


@pytest.mark.parametrize(("ep_size", "experts"), [(1, 4 * 3 * 24 * 32 * 4), (2, 2 * 3 * 24 * 32 * 4)])
def test_sizes_are_those_of_a_gathered_layer(ep_size: int, experts: int) -> None:
    """Of the experts a rank's share; of the rest everything: attention, norms, router."""
    layer = find_units(made(MOE)).layers[0]
    rest = sum(parameter.nbytes for parameter in layer.module.parameters()) - 4 * 3 * 24 * 32 * 4

    assert (experts, rest) == gathered_bytes(layer, ep_size)


def _lists(unit: Any) -> str:
    state = unit._get_fsdp_state()
    return f"{len(state._states_to_forward_prefetch)} {len(state._states_to_backward_prefetch)}"


def test_a_second_engine_replaces_the_lists_of_the_first() -> None:
    """With native nothing is left of them, the hooks on the units included."""
    explicit, native = settings("expert_lookahead", backward_prefetch_depth=2), settings("native")

    assert [("0 0", "0 0", 1)] * 2 == run_ranks(2, prepared_twice, explicit, native)
    assert [("2 1", "1 0", 2)] * 2 == run_ranks(2, prepared_twice, explicit, explicit)
