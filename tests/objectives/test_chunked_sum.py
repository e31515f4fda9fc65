"""The chunk loop itself: its sum and its gradients against a slow float64 formula, in both modes; and what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchturbo.objectives.chunk import kept_rows
from torchturbo.objectives.deferred import PLACEHOLDER, Operation
from torchturbo.objectives.gradient_in_forward import gradient_in_forward_sum
from torchturbo.objectives.recomputed import recomputed_sum

ROWS, WIDTH, TOKENS = 23, 8, 31
IGNORED = -100
SIZES = (1, 7, 1024, ROWS + 1)
CAP = 2.0
SOFTCAP = tuple(
    Operation(function, (PLACEHOLDER, *args), {})
    for function, args in ((Tensor.div, (CAP,)), (torch.tanh, ()), (Tensor.mul, (CAP,)))
)


def oracle(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, cap: float | None = None) -> Any:
    """Return sum and gradients row by row: ``log(sum(exp(z))) - z[target]``, in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    total = torch.zeros((), dtype=torch.float64)
    for row, label in enumerate(target.tolist()):
        if label == IGNORED:
            continue
        logits = leaves[1] @ leaves[0][row] + (leaves[2] if bias is not None else 0)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        total = total + logits.exp().sum().log() - logits[label]
    if not total.requires_grad:
        return total, [torch.zeros_like(leaf) for leaf in leaves]
    return total.detach(), torch.autograd.grad(total, leaves)


def operands(dtype: torch.dtype = torch.float32, ignored: str = "some", bias: bool = True) -> list[Any]:
    """Return hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (TOKENS, WIDTH), (TOKENS,))
    )
    target = torch.randint(TOKENS, (ROWS,), generator=generator)
    target[{"none": slice(0, 0), "some": slice(2, 9), "all": slice(None)}[ignored]] = IGNORED
    return [hidden, weight, offset if bias else None, target]


def in_forward(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, operations: Any, size: int) -> Tensor:
    return gradient_in_forward_sum(hidden, weight, bias, target, kept_rows(target, IGNORED), operations, size)


def recomputed(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, operations: Any, size: int) -> Tensor:
    def project(rows: Tensor) -> Tensor:
        return functional.linear(rows, weight, bias)

    parameters = [value for value in (weight, bias) if value is not None]
    return recomputed_sum(project, parameters, hidden, target, kept_rows(target, IGNORED), operations, size)


MODES = pytest.mark.parametrize("mode", [in_forward, recomputed])


def assert_close(expected: Tensor, actual: Tensor | None, relative: float) -> None:
    assert actual is not None
    error = float((expected.double() - actual.double()).norm())
    assert error <= relative * float(expected.double().norm())


@MODES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("operations", "cap"), [((), None), (SOFTCAP, CAP)], ids=["plain", "softcap"])
def test_sum_and_gradients_are_the_formulas(
    mode: Callable[..., Tensor],
    size: int,
    ignored: str,
    dtype: torch.dtype,
    relative: float,
    operations: Any,
    cap: float | None,
) -> None:
    """For every chunk size, with rows that do not count, through what a model does to its logits, and for none at all."""
    hidden, weight, bias, target = operands(dtype, ignored)
    total, gradients = oracle(hidden, weight, bias, target, cap)

    actual = mode(hidden, weight, bias, target, operations, size)
    actual.backward()

    assert dtype == actual.dtype
    assert_close(total, actual.detach(), relative)
    for expected, leaf in zip(gradients, (hidden, weight, bias), strict=True):
        assert_close(expected, leaf.grad, relative)


@MODES
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_operand_gets_no_gradient(mode: Callable[..., Tensor], frozen: int) -> None:
    """Hidden states, weight or bias; the other two get what they would."""
    given = operands()
    _, gradients = oracle(*given)
    given[frozen].requires_grad_(False)

    mode(*given, (), 7).backward()

    for at, expected in enumerate(gradients):
        if at == frozen:
            assert given[at].grad is None
        else:
            assert_close(expected, given[at].grad, 1e-6)


@MODES
def test_a_scaled_loss_scales_its_gradients(mode: Callable[..., Tensor]) -> None:
    """What is made of the sum afterwards, a mean for instance, reaches the gradients."""
    given = operands(bias=False)
    _, gradients = oracle(*given)

    (mode(*given, (), 7) * 0.125).backward()

    assert_close(gradients[0] * 0.125, given[0].grad, 1e-6)
    assert_close(gradients[1] * 0.125, given[1].grad, 1e-6)


@MODES
@pytest.mark.parametrize("size", [5, 1024])
def test_under_autocast_logits_are_half_and_the_loss_is_not(mode: Callable[..., Tensor], size: int) -> None:
    """As without chunks: bf16 products, softmax in float32, gradients in the parameters' own format."""
    given = operands()
    plain = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in given[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(*plain)  # type: ignore[arg-type]
        expected = functional.cross_entropy(logits.float(), given[3], reduction="sum")
        actual = mode(*given, (), size)
    expected.backward()
    actual.backward()

    assert torch.float32 == actual.dtype
    assert float(expected.detach()) == pytest.approx(float(actual.detach()), rel=1e-6)
    for leaf, twin in zip(given[:3], plain, strict=True):
        assert torch.float32 == leaf.grad.dtype
        assert_close(twin.grad, leaf.grad, 1e-2)


class Products(TorchDispatchMode):
    """Notes the formats of the matrix products that make logits."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and result.shape[1] == TOKENS:
            self.formats.append(result.dtype)
        return result


def test_recomputation_repeats_the_format_of_the_forward() -> None:
    """Backward runs outside of autocast."""
    given = operands(bias=False)
    given[0].requires_grad_(False)
    with Products() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            total = recomputed(*given, (), 1024)
        total.backward()

    assert [torch.bfloat16] * 2 == seen.formats


@MODES
def test_a_model_in_bf16_sums_in_float32(mode: Callable[..., Tensor]) -> None:
    """Parameters and gradients in bf16; the loss keeps its digits."""
    given = operands(torch.bfloat16)
    total, gradients = oracle(*given)

    actual = mode(*given, (), 7)
    actual.backward()

    assert torch.float32 == actual.dtype
    assert float(total) == pytest.approx(float(actual.detach()), rel=2e-2)
    for expected, leaf in zip(gradients, given, strict=False):
        assert torch.bfloat16 == leaf.grad.dtype
        assert_close(expected, leaf.grad, 5e-2)


def test_gradients_in_forward_are_handed_out_once() -> None:
    """A second backward would scale them twice; it says what to do instead."""
    total = in_forward(*operands(), (), 7)
    total.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="run the forward pass again instead of going backward twice"):
        total.backward()


def test_recomputed_gradients_can_be_handed_out_again() -> None:
    """Nothing was used up: every backward computes them anew."""
    given = operands()
    total = recomputed(*given, (), 7)
    total.backward(retain_graph=True)
    once = given[1].grad.clone()

    total.backward()

    assert torch.equal(2 * once, given[1].grad)


@MODES
def test_gradients_have_no_gradients_of_their_own(mode: Callable[..., Tensor]) -> None:
    """A gradient penalty is refused, not computed wrong."""
    given = operands()
    with pytest.raises(RuntimeError, match="can't be differentiated: turn loss_chunk.enabled off"):
        torch.autograd.grad(mode(*given, (), 7), given[0], create_graph=True)


@MODES
def test_without_gradients_the_sum_is_the_same(mode: Callable[..., Tensor]) -> None:
    """A loss that nobody goes backward from costs no gradient."""
    given = operands()
    with torch.no_grad():
        actual = mode(*given, (), 7)

    assert not actual.requires_grad
    assert float(oracle(*given)[0]) == pytest.approx(float(actual), rel=1e-6)


class Largest(TorchDispatchMode):
    """Notes the most rows [n, V] that any tensor of the vocabulary's width has, and the products that make some."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == TOKENS:
                self.rows = max(self.rows, len(value))
                self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return result


@MODES
@pytest.mark.parametrize("size", [1, 7])
def test_no_tensor_has_more_rows_of_logits_than_a_chunk(mode: Callable[..., Tensor], size: int) -> None:
    """That is what the whole thing is for; in backward neither."""
    given = operands(bias=False)
    with Largest() as seen:
        mode(*given, (), size).backward()

    assert max(size, WIDTH) >= seen.rows  # the gradient [H, V] of a transposed weight may have that width, too


@pytest.mark.parametrize(("mode", "times"), [(in_forward, 1), (recomputed, 2)])
def test_how_often_the_logits_are_computed(mode: Callable[..., Tensor], times: int) -> None:
    """Once with gradients in forward, a second time in backward with recomputation."""
    given = operands(bias=False, ignored="none")
    with Largest() as seen:
        given[0].requires_grad_(False)
        total = mode(*given, (), 7)
        in_forward_alone = seen.products
        total.backward()

    assert math.ceil(ROWS / 7) == in_forward_alone
    assert math.ceil(ROWS / 7) * times == seen.products


@pytest.mark.parametrize(("mode", "rows"), [(in_forward, 0), (recomputed, 0)])
def test_no_logits_are_kept_for_backward(mode: Callable[..., Tensor], rows: int) -> None:
    """Neither mode saves a tensor of the vocabulary's width but the weight's gradient."""
    kept: list[Any] = []
    given = operands(bias=False)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = mode(*given, (), 7)

    assert rows == len([shape for shape in kept if len(shape) == 2 and shape[1] == TOKENS])
    total.backward()


@MODES
def test_rows_that_do_not_count_cost_nothing(mode: Callable[..., Tensor]) -> None:
    """They are dropped before the head, so what they hold does not matter, not even NaN."""
    given = operands()
    total, gradients = oracle(*given)
    with torch.no_grad():
        given[0][2:9] = math.nan

    actual = mode(*given, (), 7)
    actual.backward()

    assert_close(total, actual.detach(), 1e-6)
    assert_close(gradients[1], given[1].grad, 1e-6)
    assert torch.equal(torch.zeros(7, WIDTH), given[0].grad[2:9])


@MODES
def test_a_learned_scale_gets_its_gradient(mode: Callable[..., Tensor]) -> None:
    """Only recomputation knows how; the head takes that mode then."""
    if mode is in_forward:
        from torchturbo.objectives.chunked import ChunkedHead, Chunking, _swap, needs_recomputing

        head = nn.Linear(WIDTH, TOKENS)
        _swap(head, ChunkedHead, Chunking(7))
        learned = Operation(Tensor.mul, (PLACEHOLDER, nn.Parameter(torch.ones(()))), {})
        assert not needs_recomputing(head)
        assert needs_recomputing(head, None, (learned,))
        return
    scale = torch.tensor(0.5, requires_grad=True)
    given = operands()
    logits = functional.linear(*given[:3]) * scale
    expected = torch.autograd.grad(functional.cross_entropy(logits, given[3], reduction="sum"), scale)[0]

    mode(*given, (Operation(Tensor.mul, (PLACEHOLDER, scale), {}),), 7).backward()

    assert_close(expected, scale.grad, 1e-6)
