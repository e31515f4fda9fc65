"""The pictures of the objectives' guides: committed as they are drawn, and true to what training computes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("multi_token_prediction", "dspark", "router_losses", "block_diffusion")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a picture's code, with the parts beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    yield importlib.import_module
    for name in (*NAMES, "svg"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_picture_is_the_drawn_one(load: Callable[[str], Any], name: str) -> None:
    """And a guide shows it, with words for whoever can't see it."""
    picture = load(name)
    assert picture.drawing() == picture.FILE.read_text("utf-8")
    guide = (ROOT / "docs" / "guides" / f"{picture.FILE.stem}.md").read_text("utf-8")
    assert f"](../assets/{picture.FILE.name})" in guide and "![](" not in guide


def test_the_targets_of_each_depth(load: Callable[[str], Any]) -> None:
    torch = pytest.importorskip("torch")
    labels = importlib.import_module("torchturbo.objectives.mtp.labels")
    picture = load("multi_token_prediction")
    count = sum(picture.DOCUMENTS)
    positions = torch.cat([torch.arange(length) for length in picture.DOCUMENTS])[None]
    batch = {"input_ids": torch.arange(count)[None], "labels": torch.arange(count)[None], "position_ids": positions}
    inside = importlib.import_module("torchturbo.objectives.documents").numbers_of(batch)
    for depth in range(1, picture.DEPTHS + 1):
        drawn = [picture.target(position, depth) for position in range(count)]
        assert [-100 if wanted is None else wanted for wanted in drawn] == labels.targets(batch, depth, inside)[
            0
        ].tolist()


def test_what_the_slots_of_a_draft_see(load: Callable[[str], Any]) -> None:
    torch = pytest.importorskip("torch")
    anchors = importlib.import_module("torchturbo.objectives.dspark.anchors")
    visibility = importlib.import_module("torchturbo.objectives.dspark.visibility")
    picture = load("dspark")
    targets = torch.tensor([picture.TARGETS])
    batch = {"input_ids": torch.arange(len(picture.TARGETS))[None], "labels": targets.where(targets == 1, -100)}
    sequences = anchors.Sequences.of(batch)
    chosen = torch.tensor([picture.ANCHORS])
    assert anchors.candidates(sequences)[0, chosen[0]].all()
    blocks = anchors.make_blocks(sequences, chosen, torch.ones_like(chosen, dtype=torch.bool), picture.BLOCK, 0)
    drawn = [[picture.counted(anchor, slot) for slot in range(picture.BLOCK)] for anchor in picture.ANCHORS]
    assert drawn == blocks.valid[0].tolist()
    for window in (picture.WINDOW, None):
        mask = visibility.Visibility.of(blocks, sequences).dense(window)[0, 0]
        slots = [anchor for anchor in picture.ANCHORS for _ in range(picture.BLOCK)]
        features = [
            [picture.sees_feature(anchor, at, window) for at in range(len(picture.TARGETS))] for anchor in slots
        ]
        own = [[one == other for other in slots] for one in slots]
        assert [left + right for left, right in zip(features, own, strict=True)] == mask.tolist()


def test_the_figures_of_the_router_losses(load: Callable[[str], Any]) -> None:
    """Routers that are sure of their choice: f and P are then the same shares."""
    torch = pytest.importorskip("torch")
    router_losses = importlib.import_module("torchturbo.objectives.router_losses")
    picture = load("router_losses")
    tokens, calls = 20, []
    for share in picture.LAYERS:
        chosen = [expert for expert, part in enumerate(share) for _ in range(round(part * tokens))]
        logits = torch.nn.functional.one_hot(torch.tensor(chosen)).double() * 100
        calls.append((logits, lambda values: values.softmax(-1), 1))
    valid = torch.ones(tokens, dtype=torch.bool)
    found = float(router_losses.router_losses(calls, valid).aux)
    assert sum(picture.balance(share) for share in picture.LAYERS) == pytest.approx(found, abs=1e-9)
    both = [(torch.cat([logits for logits, _, _ in calls]), *calls[0][1:])]
    pooled = float(router_losses.router_losses(both, valid.repeat(2)).aux)
    assert picture.balance(picture.pooled()) == pytest.approx(pooled, abs=1e-9)
    assert f"{found:.2f}" in picture.drawing() and f"{pooled:.2f}" in picture.drawing()


def test_who_sees_whom_in_a_doubled_sequence(load: Callable[[str], Any]) -> None:
    pytest.importorskip("torch")
    mask = importlib.import_module("torchturbo.objectives.diffusion.mask")
    picture = load("block_diffusion")
    places = range(2 * picture.LENGTH)
    drawn = [[picture.kind(query, key) is not None for key in places] for query in places]
    assert drawn == [[mask.sees(query, key, picture.LENGTH, picture.BLOCK) for key in places] for query in places]
    assert min(picture.MASKED) >= picture.PROMPT
