"""Kernels against native code and a float64 oracle: torch.compile's for real, vendors' through their stand-ins."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import stand_ins
import torch
from kernel_parity import check_gated, check_norm, check_rotary, check_token_sum

from torchturbo.ops import compiled, liger, npu

NORMS = [(0.0, True), (1.0, False)]
FORMATS = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["liger", "npu"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module of kernels whose package is a stand-in."""
    if request.param == "liger":
        stand_ins.liger_kernel(monkeypatch)
        return liger
    stand_ins.torch_npu(monkeypatch)
    return npu


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("offset", "cast_first"), NORMS, ids=["llama", "gemma"])
def test_a_vendors_norm(module: Any, offset: float, cast_first: bool, dtype: torch.dtype) -> None:
    """Gemma's weight is one less than what it multiplies by."""
    check_norm(module, offset, cast_first, dtype)


def test_a_vendors_rotary(module: Any) -> None:
    """Liger's writes over what it gets, which must be a copy."""
    check_rotary(module)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_vendors_gated_product(module: Any, dtype: torch.dtype) -> None:
    """Liger's backward writes over what forward got."""
    check_gated(module, dtype)


def test_a_vendors_cross_entropy(module: Any) -> None:
    """Liger's writes over the logits, an NPU's knows no ignored label below 0."""
    check_token_sum(module)


@pytest.mark.parametrize(("offset", "cast_first", "dtype"), [(0.0, True, torch.float32), (1.0, False, torch.bfloat16)])
def test_the_compiled_norm(offset: float, cast_first: bool, dtype: torch.dtype) -> None:
    check_norm(compiled, offset, cast_first, dtype)


def test_the_compiled_rotary() -> None:
    check_rotary(compiled)


def test_the_compiled_gated_product() -> None:
    check_gated(compiled)


def test_the_compiled_cross_entropy() -> None:
    check_token_sum(compiled)


def test_groups_of_rows_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and both gradients equal a loop's; one group is empty."""
    stand_ins.torch_npu(monkeypatch)
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 2])
    x, weight = (torch.randn(shape, requires_grad=True) for shape in [(5, 4), (3, 4, 6)])
    x2, weight2 = (value.detach().clone().requires_grad_() for value in (x, weight))

    found = npu.GroupedMatmul.apply(x, weight, counts)
    expected = torch.cat([part @ weight2[at] for at, part in enumerate(x2.split(counts.tolist()))])
    gradient = torch.randn(5, 6)
    found.backward(gradient)
    expected.backward(gradient)

    torch.testing.assert_close(expected, found)
    torch.testing.assert_close(x2.grad, x.grad)
    torch.testing.assert_close(weight2.grad, weight.grad)


GPU = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device and liger-kernel")
def test_liger_on_a_gpu() -> None:
    """The real kernels; tests/ops/interpreted runs the same ones in Triton's interpreter on a CPU."""
    for dtype in FORMATS:
        for offset, cast_first in NORMS:
            check_norm(liger, offset, cast_first, dtype, "cuda")
        check_gated(liger, dtype, "cuda")
    check_rotary(liger, "cuda")
    check_token_sum(liger, "cuda")
