"""Deferred logits: what a model may do to them on the way to its loss, and what it is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.deferred import DeferredLogits, Operation, UnknownOperation, transformed

TOKENS = 11


class Head:
    """Computes a loss in one piece, and shows what it was asked for."""

    def __init__(self) -> None:
        self.weight = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(0))
        self.operations: tuple[Operation, ...] = ()

    def loss(self, hidden: Tensor, target: Tensor, operations: tuple[Operation, ...], ignore_index: int) -> Tensor:
        self.operations = operations
        logits = transformed(functional.linear(hidden, self.weight), operations)
        return functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")


HIDDEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([[1, -100, 3], [4, 5, 6]])


def both(treatment: Callable[[Any], Any], dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of logits and of deferred logits after the same treatment."""
    head = Head()
    head.weight = head.weight.to(dtype)
    hidden = HIDDEN.to(dtype)
    real = functional.linear(hidden, head.weight)
    deferred = DeferredLogits.of(head, hidden, TOKENS, dtype)
    losses = []
    for logits in (real, deferred):
        rows = treatment(logits)
        rows = rows.view(-1, rows.shape[-1])
        losses.append(functional.cross_entropy(rows, TARGET.flatten(), **kwargs))
    assert type(losses[1]) is Tensor
    return losses[0], losses[1]


def in_place(logits: Any) -> Any:
    logits *= 3
    logits /= 2
    logits.mul_(0.5).tanh_()
    return logits


def in_place_after_views(logits: Any) -> Any:
    """Change logits whose views are gone, or were copied."""
    logits = logits.clone()  # the caller goes on holding the first
    logits = logits.float().view(-1, TOKENS)
    logits /= 2
    copied, cast = logits.clone(), logits.double()
    logits *= 3
    copied.mul_(5)
    cast.mul_(7)
    return logits


TREATMENTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda logits: logits,
    "scale": lambda logits: logits * 0.3,
    "scale from the left": lambda logits: 0.3 * logits,
    "divisor": lambda logits: logits / 3,
    "soft-capping": lambda logits: torch.tanh(logits / 2.0) * 2.0,
    "functions": lambda logits: torch.mul(torch.div(logits, 3), 2).neg().clamp(max=1.0),
    "in place": in_place,
    "in place, after views": in_place_after_views,
    "scale of one number": lambda logits: logits * torch.tensor([0.3]),
    "bias": lambda logits: logits + torch.arange(TOKENS),
    "casts": lambda logits: logits.double().float().contiguous().to(torch.float64).clone(),
    "padded vocabulary": lambda logits: logits[..., :7],
    "padded vocabulary, all dimensions": lambda logits: logits[:, :, :7] * 2,
    "reshape before scaling": lambda logits: logits.reshape(6, TOKENS) * 2,
    "flatten": lambda logits: logits.flatten(0, 1),
}


@pytest.mark.parametrize("treatment", TREATMENTS.values(), ids=list(TREATMENTS))
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_is_done_to_logits_is_done_to_chunks(treatment: Callable[[Any], Any], reduction: str) -> None:
    """The loss is the one of real logits with the same operations."""
    expected, actual = both(treatment, reduction=reduction)

    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_half_formats_lose_no_digits_in_the_softmax() -> None:
    """A model that casts to float32 does it in each chunk, one that forgot gets it nevertheless."""
    expected, actual = both(lambda logits: logits.float(), torch.bfloat16)
    _, forgotten = both(lambda logits: logits, torch.bfloat16)

    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert torch.equal(actual, forgotten)
    assert torch.float32 == actual.dtype


def test_an_operation_that_changes_nothing_is_not_noted() -> None:
    """A cast to the format they have would cost a pass over every chunk."""
    head = Head()
    logits = DeferredLogits.of(head, HIDDEN, TOKENS, torch.float32).float().contiguous() * 2

    functional.cross_entropy(logits.view(-1, TOKENS), TARGET.flatten())

    assert ["mul"] == [operation.function.__name__ for operation in head.operations]


def test_they_look_like_logits_and_hold_no_memory() -> None:
    """Models read shapes, formats and devices."""
    logits = DeferredLogits.of(Head(), HIDDEN, 1_000_000_000, torch.float32)

    assert (2, 3, 1_000_000_000) == tuple(logits.shape)
    assert 3 == logits.dim() == logits.ndim
    assert 2 == len(logits)
    assert 1_000_000_000 == logits.size(-1)
    assert torch.float32 == logits.dtype
    assert HIDDEN.device == logits.device
    assert logits.is_floating_point()
    assert not logits.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        assert 4 == logits.untyped_storage().nbytes()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "positions": (lambda logits: logits[..., :-1, :], r"__getitem__\(\)"),
    "one position": (lambda logits: logits[0], r"__getitem__\(\)"),
    "a mask": (lambda logits: logits[TARGET != -100], r"__getitem__\(\)"),
    "softmax": (lambda logits: logits.softmax(-1), r"softmax\(\)"),
    "largest token": (lambda logits: logits.argmax(-1), r"argmax\(\)"),
    "transposed": (lambda logits: logits.mT, "attribute mT"),
    "a scale for each row": (lambda logits: logits * torch.ones(2, 3, 1), "differs between rows"),
    "a scale for each logit": (lambda logits: logits * torch.ones(2, 3, TOKENS), "differs between rows"),
    "themselves": (lambda logits: logits * logits, "of several logits"),
    "other rows": (lambda logits: logits.view(-1, 2, 3), r"view\(\) to \[11, 2, 3\] from \[2, 3, 11\]"),
    "integers": (lambda logits: logits.to(torch.int64), "differs between rows"),
}


@pytest.mark.parametrize(("treatment", "told"), REFUSED.values(), ids=list(REFUSED))
def test_anything_else_is_an_error_with_its_name(treatment: Callable[[Any], Any], told: str) -> None:
    """Never a number made of what only stands for logits."""
    with pytest.raises(UnknownOperation, match=told):
        treatment(DeferredLogits.of(Head(), HIDDEN, TOKENS, torch.float32))


def after(view: Callable[[Any], Any], of_the_view: bool = False) -> Callable[[Any], Any]:
    def treatment(logits: Any) -> Any:
        other = view(logits)
        other, logits = (logits, other) if of_the_view else (other, logits)
        logits /= 2
        return other

    return treatment


ALIASES = {
    "of what was reshaped": after(lambda logits: logits.view(-1, TOKENS)),
    "of a reshape": after(lambda logits: logits.reshape(-1, TOKENS), of_the_view=True),
    "of a reshape's reshape": after(lambda logits: logits.flatten(0, 1).view(6, 1, TOKENS)),
    "of what was cut": after(lambda logits: logits[..., :7]),
    "of a cut": after(lambda logits: logits[..., :7], of_the_view=True),
    "of what was cast to its own format": after(lambda logits: logits.float()),
    "by a function": lambda logits: (logits.view(-1, TOKENS), torch.tanh_(logits)),
    "of a view at once": lambda logits: logits.view(-1, TOKENS).mul_(2),
}


@pytest.mark.parametrize("treatment", ALIASES.values(), ids=list(ALIASES))
def test_a_change_in_place_that_others_would_see_is_an_error(treatment: Callable[[Any], Any]) -> None:
    """Real logits share their memory with their views; what is noted for one is not noted for the other."""
    logits = DeferredLogits.of(Head(), HIDDEN, TOKENS, torch.float32)

    with pytest.raises(UnknownOperation, match="in place while a view of them is in use"):
        treatment(logits)


LOSSES: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.1},
    "class weights": {"weight": torch.ones(TOKENS)},
    "a loss for each token": {"reduction": "none"},
}


@pytest.mark.parametrize("arguments", LOSSES.values(), ids=list(LOSSES))
def test_a_cross_entropy_of_another_kind_is_an_error(arguments: dict[str, Any]) -> None:
    """The chunks know sums and means."""
    logits = DeferredLogits.of(Head(), HIDDEN, TOKENS, torch.float32)

    with pytest.raises(UnknownOperation, match="cross_entropy"):
        functional.cross_entropy(logits.view(-1, TOKENS), TARGET.flatten(), **arguments)


def test_logits_and_targets_must_fit() -> None:
    """As for real logits."""
    logits = DeferredLogits.of(Head(), HIDDEN, TOKENS, torch.float32)

    with pytest.raises(ValueError, match="6 rows of logits, 5 targets"):
        functional.cross_entropy(logits.view(-1, TOKENS), TARGET.flatten()[:5])
    with pytest.raises(UnknownOperation, match=r"rows \[N, V\] and target tokens \[N\]"):
        functional.cross_entropy(logits.view(-1, TOKENS), torch.zeros(6, TOKENS))


def test_a_mean_of_nothing_is_zero() -> None:
    """Not NaN: it is what a step without targets adds."""
    logits = DeferredLogits.of(Head(), HIDDEN, TOKENS, torch.float32)

    assert 0.0 == float(functional.cross_entropy(logits.view(-1, TOKENS), torch.full((6,), -100)))
