"""The arithmetic of a plan: shards and their padding, axes and nodes, what is gathered at once, sizes as text."""

from __future__ import annotations

import pytest

from torchturbo.engine.backends.fsdp2.prefetch import Layer, prefetch_lists
from torchturbo.parallel.mesh import MeshPlan
from torchturbo.plan.memory import ADAMW, MUON, Range, Weight, gradient_bytes, optimizer_bytes, parameter_bytes
from torchturbo.plan.mesh import axes, ranks_text
from torchturbo.plan.optimizer import optimizer_of
from torchturbo.plan.sizes import count, read_size
from torchturbo.plan.traffic import passing, traffic


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 30])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pieces_are_those_of_torch_chunk(length: int, ranks: int) -> None:
    """Whole pieces first, then what is left, then nothing; every buffer is a whole piece."""
    torch = pytest.importorskip("torch")
    weight = Weight("w", (length, 6), 4, True, "", 0, ranks)
    pieces = [piece.numel() for piece in torch.chunk(torch.empty(length, 6), ranks)]
    pieces += [0] * (ranks - len(pieces))
    assert pieces == [weight.held(rank) for rank in range(ranks)]
    assert pieces[0] == weight.padded and pieces[0] * ranks == weight.gathered


def test_experts_are_split_twice() -> None:
    """Dimension 0 over the expert-parallel ranks, another over those that share a set."""
    weight = Weight("e", (8, 6, 10), 4, True, "", 1, 2, 4)  # 8 ranks: ep 4, ep_fsdp 2
    assert [2 * 3 * 10] * 8 == [weight.held(rank) for rank in range(8)]
    assert 2 * 6 * 10 == weight.gathered


def test_a_frozen_parameter_has_neither_gradient_nor_state() -> None:
    """It only lies there, in its own format."""
    weights = [Weight("w", (4, 4), 2, False, "", 0, 2), Weight("v", (3,), 4, True, "", 0, 2)]
    assert 2 * 4 * 2 + 2 * 4 == parameter_bytes(weights)
    assert 2 * 4 == gradient_bytes(weights)
    assert 2 * 2 * 4 + 4 == optimizer_bytes(weights, [ADAMW, ADAMW], 0)
    assert 2 * 1 * 4 + 4 == optimizer_bytes(weights, [ADAMW, ADAMW], 1)


def test_sixteen_thousand_ranks_cost_no_more_than_two() -> None:
    """The first and the last rank are asked, none between them."""
    asked: list[int] = []
    assert Range(0, 16383) == Range.of(lambda rank: asked.append(rank) or rank, 16384)
    assert [0, 16383] == asked


def test_muon_has_one_moment_for_its_matrices() -> None:
    """And AdamW's two for the rest; another optimizer's state may not be known."""
    weights = [Weight("m", (4, 4), 4, True, ""), Weight("norm", (4,), 4, True, "")]
    assert (MUON, ADAMW) == optimizer_of(weights, "adamw_torch", "muon", {"m"}).rules
    assert (ADAMW, ADAMW) == optimizer_of(weights, "adamw_torch_fused", None, {"m"}).rules
    assert optimizer_of(weights, "adafactor", None, ()).rules is None


def test_the_known_optimizers_keep_what_torch_keeps() -> None:
    """A step of each on one parameter: tensors of its shape, and scalars."""
    torch = pytest.importorskip("torch")
    kinds = [
        ("adamw_torch", torch.optim.AdamW, None, {}),
        ("sgd", torch.optim.SGD, None, {}),
        ("sgd", torch.optim.SGD, "momentum=0.9", {"momentum": 0.9}),
        ("adagrad", torch.optim.Adagrad, None, {}),
        ("rmsprop", torch.optim.RMSprop, None, {}),
        ("rmsprop", torch.optim.RMSprop, "momentum=0.9, centered=True", {"momentum": 0.9, "centered": True}),
    ]
    for name, kind, written, settings in kinds:
        parameter = torch.nn.Parameter(torch.ones(3, 5))
        optimizer = kind([parameter], lr=0.1, **settings)
        parameter.sum().backward()
        optimizer.step()
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        weight = Weight("w", (3, 5), 4, True, "")
        rules = optimizer_of([weight], name, None, (), written).rules
        assert rules is not None
        assert sum(value.numel() * value.element_size() for value in state) == rules[0].bytes(weight, 0), name


# ---- mesh ----


@pytest.mark.parametrize(
    "world, sp, ep, per_node", [(8, 2, 4, 8), (24, 3, 6, 8), (12, 4, 2, 8), (6, 1, 6, 4), (4, 1, 1, 8)]
)
def test_axes_are_the_groups_of_ranks(world: int, sp: int, ep: int, per_node: int) -> None:
    """Held against groups that are made rank by rank from the mesh's own numbering."""
    mesh = MeshPlan(world, sp, ep)
    keys = {"dp": mesh.sp_rank, "sp": mesh.dp_rank, "ep_fsdp": mesh.ep_rank, "ep": mesh.ep_fsdp_rank}
    for axis in axes(mesh, per_node):
        groups: dict[int, list[int]] = {}
        for rank in range(world):
            groups.setdefault(keys[axis.name](rank), []).append(rank)
        assert groups[0] == list(axis.first_group)
        assert (len(groups), len(groups[0])) == (axis.groups, axis.size)
        spans = any(len({rank // per_node for rank in group}) > 1 for group in groups.values())
        assert spans == axis.spans_nodes, axis


def test_ranks_are_written_as_people_write_them() -> None:
    """Neighbours as a stretch, a few one by one, many with their first and last."""
    texts = ["0", "0, 1", "0-3", "0, 4, 8, 12", "0, 4, 8 … 60"]
    groups = [range(1), range(2), range(4), range(0, 16, 4), range(0, 64, 4)]
    assert texts == [ranks_text(group) for group in groups]


# ---- what passes through ----

LAYERS = [Layer(f"layers.{at}", (f"layers.{at}.experts",), "layers") for at in range(4)]
WEIGHTS = [
    Weight("head", (10, 10), 4, True, ""),
    *(Weight(f"{layer.name}.w", (10, 10), 4, True, layer.name, 0, 2) for layer in LAYERS),
    *(Weight(f"{layer.name}.e", (4, 10, 10), 4, True, layer.experts[0], 0, 2) for layer in LAYERS),
]


@pytest.mark.parametrize(
    ("strategy", "depth", "layers", "experts"),
    [
        ("native", 1, 2, 2),  # FSDP2's own order: a layer and the next
        ("expert_with_layer", 1, 2, 2),
        ("expert_with_layer", 2, 3, 3),
        ("expert_lookahead", 1, 2, 2),
    ],
)
def test_a_layer_is_held_with_what_it_asks_for(strategy: str, depth: int, layers: int, experts: int) -> None:
    """The root all the time, and one all-gather's buffer, here the experts'."""
    lists = prefetch_lists(LAYERS, strategy, "forward_backward", depth, depth)
    found = passing(WEIGHTS, LAYERS, lists, itemsize=None, reshard=True)
    assert 400 + layers * 400 + experts * 1600 + 1600 == found.gathered
    assert 2 * 1600 == found.reducing


def test_without_resharding_everything_is_held() -> None:
    """In bf16 it is half; gradients are reduced in fp32 beside their own format."""
    found = passing(WEIGHTS, LAYERS, {}, itemsize=2, reshard=False)
    assert (400 + 4 * 400 + 4 * 1600) // 2 + 800 == found.gathered
    assert 800 + 1600 == found.reducing


def test_a_replica_in_each_node_saves_the_gathers() -> None:
    """Two gathers and one reduction for each micro-batch, against one sum of gradients a step."""
    weights = [Weight("w", (100,), 4, True, "")]
    assert (3 * (2 * 400 + 400) * 3 // 4, 2 * 400 * 3 // 4) == traffic(weights, 4, 3, itemsize=None, gathers=2)


# ---- text ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5 tib", 3 * 2**39),
        ("512", 512),
        ("0", None),
        ("80GX", None),
        ("-1G", None),
    ],
)
def test_sizes_are_read(text: str, expected: int | None) -> None:
    """Powers of 1,024, and of 1,000 where the unit says so."""
    assert expected == read_size(text)


def test_counts_are_short() -> None:
    """Three digits and a word."""
    assert ["70,496", "1.54 million", "235 billion", "1 trillion"] == [
        count(number) for number in (70_496, 1_543_714, 235_093_634_560, 10**12)
    ]
