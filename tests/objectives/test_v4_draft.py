"""DeepSeek-V4's DSpark stages: what their blocks see, and their states beside the formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import v4
import v4_oracle as oracle
from torch import Tensor

from torchturbo.objectives.dspark.anchors import Sequences, make_blocks
from torchturbo.objectives.dspark.deepseek_v4 import DeepseekV4Draft
from torchturbo.objectives.dspark.visibility import Visibility

LENGTH, SIZE, FEATURES = 12, 3, 3 * v4.HIDDEN
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
ANCHORS = torch.tensor([[1, 6, 9, 5]])
KEEP = torch.tensor([[True, True, True, False]])


def draft(**changes: Any) -> DeepseekV4Draft:
    return v4.stir(DeepseekV4Draft(v4.config(**(v4.DSPARK | changes)), 3), 4)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Visibility]:
    """Return features, embedded blocks, and what these see of one row of two documents, of 8 and 4 tokens."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, LENGTH, FEATURES, generator=generator, dtype=dtype)
    embedded = torch.randn(1, 4, SIZE, v4.HIDDEN, generator=generator, dtype=dtype)
    tokens = torch.arange(LENGTH)[None] + 3
    documents = torch.tensor([[0] * 8 + [1] * 4])
    sequences = Sequences(tokens, torch.ones(1, LENGTH, dtype=torch.bool), documents, POSITIONS)
    return features, embedded, Visibility.of(make_blocks(sequences, ANCHORS, KEEP, SIZE, 63), sequences)


def by_formula(features: Tensor, embedded: Tensor, weights: dict[str, Tensor], sizes: Any, block: int) -> Any:
    """Return what the head and the confidence head look at [K, H] of one block, from its row's features [S, m*H]."""
    anchor, positions = int(ANCHORS[0, block]), POSITIONS[0].tolist()
    begin = 8 if anchor >= 8 else 0
    first, last = oracle.of_block(weights, 0), oracle.of_block(weights, 2)
    before = range(max(begin, anchor - sizes.sliding_window), anchor) if KEEP[0, block] else []
    context = [oracle.rms(first["main_proj.weight"] @ features[at], first["main_norm.weight"]) for at in before]
    state = embedded[:, None].expand(-1, sizes.hc_mult, -1)
    slots = [positions[anchor] + slot for slot in range(SIZE)]
    for stage in range(3):
        mine = oracle.of_block(weights, stage)
        keys = [oracle.latent(c, positions[at], mine, sizes) for c, at in zip(context, before, strict=True)]
        state = oracle.block(state, slots, lambda t, own, keys=keys: [*keys, *own], mine, sizes)
    joined = oracle.joined(state, last, sizes)
    return oracle.rms(joined, last["norm.weight"]), joined


def test_the_stages_are_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both states of all slots, one of the blocks only filling up, and gradients of all weights, features and inputs."""
    stages = draft()
    sizes = stages.layers[0].self_attn.config
    sizes._experts_implementation = "eager"
    stages = stages.double()
    features, embedded, visibility = inputs(torch.float64)
    leaves = [features.requires_grad_(), embedded.requires_grad_()]
    names = [name for name, _ in stages.named_parameters() if "markov" not in name and "confidence" not in name]
    parameters = [stages.get_parameter(name) for name in names]
    with v4.in_double(monkeypatch):
        found = stages(features, embedded, visibility)
        pull = [torch.randn_like(found.head), torch.randn_like(found.confidence)]
        total = sum((a * b).sum() for a, b in zip(found, pull, strict=True))
        gradients = torch.autograd.grad(total, [*leaves, *parameters])
    weights = v4.named(stages)
    mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    rows = [by_formula(mine[0][0], mine[1][0, block], weights, sizes, block) for block in range(4)]
    expected = [torch.stack(several)[None] for several in zip(*rows, strict=True)]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
    total = sum((a * b).sum() for a, b in zip(expected, pull, strict=True))
    theirs = torch.autograd.grad(total, [*mine, *weights.values()], allow_unused=True)
    for one, two in zip(gradients[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients[2:], strict=True):
            parameter.copy_(gradient)
    ours = v4.named(stages)
    untouched = ("gate.bias", "markov_w1.weight", "markov_w2.weight", "confidence_head.proj.weight")
    for name, gradient in zip(weights, theirs[2:], strict=True):
        if not name.endswith(untouched):  # the first only chooses, the others are no part of the states
            wanted = torch.zeros_like(ours[name]) if gradient is None else gradient
            torch.testing.assert_close(ours[name].detach(), wanted, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("block", [1, 2])
def test_a_block_sees_a_window_of_its_document_before_its_anchor(block: int) -> None:
    """One by one, the features that move a block's states are those at [p - W, p - 1], none of another document's."""
    stages = draft()
    anchor, begin = int(ANCHORS[0, block]), (0, 0, 8)[block]
    features, embedded, visibility = inputs()
    moved = []
    plain = stages(features, embedded, visibility).head
    for at in range(LENGTH):
        other = features.clone()
        other[0, at] += 1
        change = stages(other, embedded, visibility).head - plain
        if change[0, block].abs().max() > 1e-6:
            moved.append(at)

    assert list(range(max(begin, anchor - v4.WINDOW), anchor)) == moved


def test_blocks_do_not_see_each_other() -> None:
    """Other inputs in one block leave the others as they are, to the bit, and move every slot of its own."""
    stages = draft()
    features, embedded, visibility = inputs()
    plain = stages(features, embedded, visibility).head
    other = embedded.clone()
    other[0, 1, 2] += 1
    change = (stages(features, other, visibility).head - plain)[0].abs().amax(-1)

    assert [False, True, False, False] == change.gt(1e-6).any(-1).tolist()
    assert [True] * SIZE == change[1].gt(1e-6).tolist()
    order = torch.tensor([2, 0, 3, 1])
    swapped = Visibility(
        ANCHORS[:, order], KEEP[:, order], visibility.documents, POSITIONS, visibility.positions[:, order]
    )
    torch.testing.assert_close(stages(features, embedded[:, order], swapped).head, plain[:, order])


def test_a_block_among_others_is_the_block_that_is_drafted_alone() -> None:
    """As in inference: one block, and a context that ends before its anchor."""
    stages = draft()
    features, embedded, visibility = inputs()
    together = stages(features, embedded, visibility)
    for block, anchor in enumerate(ANCHORS[0, :3].tolist()):
        cut = slice(0, anchor + 1)
        alone = Visibility(
            ANCHORS[:, block : block + 1],
            KEEP[:, block : block + 1],
            visibility.documents[:, cut],
            POSITIONS[:, cut],
            visibility.positions[:, block : block + 1],
        )
        context = features[:, cut].clone()
        context[:, -1] = 1e6  # nobody knows the anchor's own features then
        found = stages(context, embedded[:, block : block + 1], alone)
        for one, several in zip(found, together, strict=True):
            torch.testing.assert_close(one[:, 0], several[:, block])


def test_what_is_seen_is_what_the_rule_says() -> None:
    """The gathered keys of each block are those of the mask that other drafts attend with."""
    stages = draft()
    features, _, visibility = inputs()
    window = stages._window(features, visibility)
    seen = visibility.dense(v4.WINDOW)[0, 0, ::SIZE, :LENGTH]
    found = torch.zeros(4, LENGTH, dtype=torch.bool)
    for block in range(4):
        found[block, window.places[0, block][window.visible[0, block]]] = True

    assert seen.tolist() == found.tolist()


def test_features_are_the_mean_over_the_streams() -> None:
    states = [torch.randn(2, 5, v4.STREAMS, v4.HIDDEN) for _ in range(3)]
    found = draft().features(states)

    torch.testing.assert_close(found, torch.cat([(state[:, :, 0] + state[:, :, 1]) / 2 for state in states], -1))
