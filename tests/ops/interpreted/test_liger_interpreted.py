"""Liger's real kernels on a CPU, in Triton's interpreter: `nox -s liger` installs both.

What the interpreter runs is the kernels' own source, program by program, in numpy. It knows no scalar that is a float
and no function of libdevice; both are filled in below, the kernels are not touched.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import tiny
import torch
import triton.language as tl
from kernel_parity import check_gated, check_norm, check_rotary, check_token_sum
from liger_kernel.ops import rms_norm as rms_norm_kernels
from triton.runtime import interpreter

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.engine import Context
from torchturbo.engine.steps import ops
from torchturbo.generated.keys import KEYS
from torchturbo.ops import liger
from torchturbo.runtime.cpu import CpuRuntime


def rsqrt(x: Any) -> Any:
    """Return Triton's own, looked up when it is called: the interpreter puts its version into ``tl`` for a launch."""
    return tl.rsqrt(x)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the interpreter take floats as a GPU does, as float32, and libdevice's rsqrt be Triton's."""
    before = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return before(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm_kernels, "rsqrt", rsqrt)
    yield


@pytest.mark.parametrize(
    ("offset", "cast_first", "dtype"),
    [(0.0, True, torch.float32), (1.0, False, torch.float32), (1.0, False, torch.bfloat16)],
    ids=["llama", "gemma", "gemma in bf16"],
)
def test_the_norm(offset: float, cast_first: bool, dtype: torch.dtype) -> None:
    """The interpreter loads and stores bfloat16, but can't compute in it as Llama's norm and SwiGLU do."""
    check_norm(liger, offset, cast_first, dtype)


def test_the_rotary_embedding() -> None:
    check_rotary(liger)


def test_the_gated_product() -> None:
    check_gated(liger)


def test_the_cross_entropy() -> None:
    check_token_sum(liger)


class Gpu(CpuRuntime):
    """A CPU that says it is a GPU."""

    device_type = "cuda"


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_whole_model(kind: str) -> None:
    """Loss and every gradient under custom equal the native model's."""
    words = [str(KEYS["mixed_precision"].cli), "fp32", str(KEYS["ops.policy"].cli), "custom"]
    ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 5 == 0, -100)
    model, native = tiny.model(kind), tiny.model(kind)
    ops.apply(model, build_from_args(parse_torchturbo_args(words)[0]), Context(runtime=Gpu()))
    assert "forward" in vars(model.model.layers[0].self_attn) and "forward" in vars(model.model.norm)

    for each in (model, native):
        each(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    for ours, theirs in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, atol=2e-6 * float(theirs.grad.abs().max()), rtol=1e-4)
