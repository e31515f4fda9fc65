"""The three terms of the loss by hand, in chunks, and how many rows of logits ever exist."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchturbo.objectives.dspark.loss import Alphas, Head, Slots, confidence_loss, logit_losses

OFFICIAL = Alphas(0.1, 0.9, 1.0)
SHAPE = (2, 4, 5, 11)
"""Rows, anchors, slots, vocabulary."""


def given(seed: int = 0, hidden: int = 6, rank: int = 3) -> tuple[Slots, Head, Tensor]:
    """Return float64 slots of all anchors with decaying weights of which some are 0, a head, and W2."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    rows, anchors, size, vocabulary = SHAPE
    count = rows * anchors * size
    valid = torch.rand(rows, anchors, size).gt(0.2).long().cumprod(-1)
    weights = (valid * torch.exp(-torch.arange(size) / 4.0)).flatten()
    slots = Slots(
        torch.randn(count, hidden, requires_grad=True),
        torch.randn(count, rank, requires_grad=True),
        torch.randn(count, hidden),
        torch.randint(0, vocabulary, (count,)),
        weights,
    )
    head = Head(torch.randn(vocabulary, hidden), torch.randn(vocabulary))
    w2 = torch.randn(vocabulary, rank, requires_grad=True)
    torch.set_default_dtype(torch.float32)
    return slots, head, w2


def by_hand(slots: Slots, head: Head, w2: Tensor, alphas: Alphas) -> tuple[Tensor, list[float]]:
    """Return the sum of the losses and the chances of acceptance, slot by slot and word by word."""
    total, chances = torch.zeros((), dtype=torch.float64), []
    assert slots.latent is not None
    assert head.bias is not None
    for at in range(len(slots.labels)):
        draft = [head.weight[v] @ slots.hidden[at] + head.bias[v] + w2[v] @ slots.latent[at] for v in range(SHAPE[-1])]
        teacher = [math.exp(head.weight[v] @ slots.teacher[at] + head.bias[v]) for v in range(SHAPE[-1])]
        powers = [value.exp() for value in draft]
        own = [power / sum(powers) for power in powers]
        distance = sum((p - t / sum(teacher)).abs() for p, t in zip(own, teacher, strict=True))
        total = total + slots.weights[at] * (-alphas.ce * own[slots.labels[at]].log() + alphas.l1 * distance)
        chances.append(min(1.0, max(0.0, 1 - float(distance.detach()) / 2)))  # type: ignore[arg-type]
    return total, chances


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_the_formula_in_chunks_of_any_size(size: int) -> None:
    slots, head, w2 = given()
    expected, chances = by_hand(slots, head, w2, OFFICIAL)

    total, accepted = logit_losses(slots, head, w2, OFFICIAL, size)

    assert float(expected.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    assert chances == pytest.approx(accepted.tolist(), rel=1e-10)
    assert not accepted.requires_grad
    leaves = [slots.hidden, slots.latent, w2]
    for one, two in zip(torch.autograd.grad(expected, leaves), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_a_draft_like_its_target_is_accepted() -> None:
    slots, head, w2 = given()
    same = slots._replace(hidden=slots.teacher.clone().requires_grad_(), latent=None)
    total, accepted = logit_losses(same, head, None, Alphas(0.0, 1.0, 0.0), 7)

    assert float(total.detach()) == pytest.approx(0.0, abs=1e-12)
    assert accepted.tolist() == pytest.approx([1.0] * len(accepted))


def test_distance_is_the_full_l1() -> None:
    """Between distributions that share nothing it is 2, and nothing is accepted."""
    head = Head(torch.eye(4) * 100)
    slots = Slots(torch.eye(4)[:2], None, torch.eye(4)[2:], torch.tensor([0, 1]), torch.ones(2))
    total, accepted = logit_losses(slots, head, None, Alphas(0.0, 1.0, 0.0), 8)

    assert float(total) == pytest.approx(4.0)
    assert accepted.tolist() == [0.0, 0.0]


def test_confidence_learns_from_the_draft_and_not_the_draft_from_it() -> None:
    """With the other weights at 0 the draft's states and W2 get a gradient of exactly 0, the confidence logits theirs."""
    slots, head, w2 = given()
    logits = torch.randn(len(slots.labels), dtype=torch.float64, requires_grad=True)
    total, accepted = logit_losses(slots, head, w2, Alphas(0.0, 0.0, 1.0), 7)
    value = total + confidence_loss(logits, accepted, slots.weights)
    sure = logits.sigmoid()
    slow = [-(c * s.log() + (1 - c) * (1 - s).log()) * w for c, s, w in zip(accepted, sure, slots.weights, strict=True)]
    expected: Any = sum(slow)

    assert float(expected.detach()) == pytest.approx(float(value.detach()), rel=1e-12)
    of_draft = torch.autograd.grad(value, [slots.hidden, w2], retain_graph=True)
    assert [0.0, 0.0] == [float(one.abs().sum()) for one in of_draft]
    torch.testing.assert_close(
        (sure.detach() - accepted) * slots.weights, torch.autograd.grad(value, logits)[0], rtol=1e-10, atol=1e-12
    )


def test_half_precision_is_widened() -> None:
    slots, head, w2 = given()
    slots = Slots(*(one.bfloat16() if one is not None and one.is_floating_point() else one for one in slots))  # type: ignore[arg-type]
    slots = slots._replace(weights=slots.weights.float())
    narrow = Head(head.weight.bfloat16(), head.bias.bfloat16())  # type: ignore[union-attr]
    total, accepted = logit_losses(slots, narrow, w2.bfloat16(), OFFICIAL, 7)

    assert [torch.float32] * 2 == [total.dtype, accepted.dtype]


class Living(TorchDispatchMode):
    """Counts the rows of logits that live at the same time, and the most that one tensor has."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.most, self.peak = vocabulary, 0, 0
        self.living: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == self.vocabulary:
                storage = one.untyped_storage()
                rows = storage.nbytes() // (self.vocabulary * one.element_size())
                self.most = max(self.most, rows)
                self.living[storage._cdata] = (weakref.ref(one), rows)
        self.living = {key: (one, rows) for key, (one, rows) in self.living.items() if one() is not None}
        self.peak = max(self.peak, sum(rows for _, rows in self.living.values()))
        return result


def test_one_chunk_of_logits_lives_at_a_time() -> None:
    """In forward and in backward, of draft and target; what lives does not grow with the number of chunks."""
    peaks = {}
    for count in (64, 256):
        torch.manual_seed(0)
        slots = Slots(
            torch.randn(count, 6, requires_grad=True), torch.randn(count, 3, requires_grad=True), torch.randn(count, 6),
            torch.randint(0, 97, (count,)), torch.ones(count),
        )  # fmt: skip
        with Living(97) as seen:
            total, _ = logit_losses(
                slots, Head(torch.randn(97, 6)), torch.randn(97, 3, requires_grad=True), OFFICIAL, 16
            )
            total.backward()
        assert seen.most == 16
        peaks[count] = seen.peak
    assert peaks[256] == peaks[64]
    assert peaks[256] <= 3 * 16  # the target's probabilities, the draft's logits, and what is made of them


def test_with_a_graph_they_would_pile_up() -> None:
    """The measure above sees it."""
    hidden, weight = torch.randn(256, 6, requires_grad=True), torch.randn(97, 6)
    with Living(97) as seen:
        parts = [(part @ weight.t()).log_softmax(-1).exp().sum() for part in hidden.split(16)]
        torch.stack(parts).sum().backward()
    assert seen.peak > 256


def test_gradients_follow_what_is_made_of_the_loss() -> None:
    """A multiple of it, and twice where the graph is kept; their own slopes are not known."""
    slots, head, w2 = given()
    total, _ = logit_losses(slots, head, w2, OFFICIAL, 7)
    (once,) = torch.autograd.grad(total, slots.hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * total, slots.hidden, retain_graph=True)

    torch.testing.assert_close(3 * once, thrice)
    with pytest.raises(RuntimeError, match="can't be differentiated"):
        torch.autograd.grad(total, slots.hidden, create_graph=True)


@pytest.mark.parametrize("frozen", ["hidden", "latent", "w2"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    """And the others get what they would."""
    slots, head, w2 = given()
    leaves = {"hidden": slots.hidden, "latent": slots.latent, "w2": w2}
    logit_losses(slots, head, w2, OFFICIAL, 7)[0].backward()
    expected = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}
    others = {name: leaf.detach().requires_grad_(name != frozen) for name, leaf in leaves.items() if leaf is not None}
    changed = slots._replace(hidden=others["hidden"], latent=others["latent"])
    logit_losses(changed, head, others["w2"], OFFICIAL, 7)[0].backward()

    assert others.pop(frozen).grad is None
    for name, leaf in others.items():
        torch.testing.assert_close(expected[name], leaf.grad)


def test_autocast_computes_as_in_its_format() -> None:
    """Products in bfloat16, their gradients in the format of what they belong to; the losses in float32."""
    slots, head, w2 = given()
    wide = Slots(*(one.float().detach().requires_grad_(one.requires_grad) if one.is_floating_point() else one for one in slots))  # type: ignore[union-attr, arg-type]  # fmt: skip
    narrow = wide._replace(**{name: getattr(wide, name).bfloat16() for name in ("hidden", "latent", "teacher")})
    plain, matrix = Head(head.weight.float(), head.bias.float()), w2.detach().float().requires_grad_()  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = logit_losses(wide, plain, matrix, OFFICIAL, 7)
    of_wide = torch.autograd.grad(total, [wide.hidden, matrix])
    bfloats = Head(*(one.bfloat16() for one in plain))  # type: ignore[union-attr]
    expected, _ = logit_losses(narrow, bfloats, matrix.bfloat16(), OFFICIAL, 7)

    assert float(expected.detach()) == pytest.approx(float(total.detach()))
    assert [torch.float32] * 3 == [total.dtype, *(one.dtype for one in of_wide)]


def test_no_slots_are_an_error() -> None:
    empty = Slots(*(torch.zeros(0, 2), None, torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0)))
    with pytest.raises(ValueError, match="no slots"):
        logit_losses(empty, Head(torch.zeros(3, 2)), None, OFFICIAL, 4)
