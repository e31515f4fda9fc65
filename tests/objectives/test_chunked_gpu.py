"""The chunked loss at full size on a CUDA device: 8,192 tokens over a vocabulary of 151,936.

In bf16, and as the engine trains: float32 weights and hidden states under bf16 autocast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from torchturbo.objectives import chunked

ROWS, TOKENS, WIDTH = 8192, 151936, 2048

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


class OtherLinear(nn.Linear):
    """A head that has to be recomputed: no plain ``nn.Linear``."""


class Model(nn.Module):
    """A head and Transformers' loss."""

    def __init__(self, kind: type[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = kind(WIDTH, TOKENS, bias=False, device="cuda", dtype=dtype)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor, labels: Any = None) -> Any:
        logits = self.head(hidden)
        return ForCausalLMLoss(logits, labels, TOKENS), logits


def step(kind: type[nn.Linear], chunks: bool, autocast: bool) -> tuple[float, Tensor, Tensor, int]:
    """Return loss, the gradients of hidden states and weight, and the peak less what is held at the end, in bytes."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = Model(kind, dtype)
    hidden = torch.randn(1, ROWS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(TOKENS, (1, ROWS), device="cuda")
    if chunks:
        chunked.install(model, 1024)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(hidden, labels=labels)[0]
    loss.backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    assert hidden.grad is not None and model.head.weight.grad is not None
    return float(loss.detach()), hidden.grad, model.head.weight.grad, torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize(
    ("autocast", "times"),
    # Chunks under autocast hold the cast weight and its gradient in two formats, too.
    [pytest.param(False, 6, id="bf16"), pytest.param(True, 4, id="fp32 under autocast")],
)
@pytest.mark.parametrize("kind", [nn.Linear, OtherLinear], ids=["gradient in forward", "recompute"])
def test_the_full_shape_takes_a_fraction_of_the_memory(kind: type[nn.Linear], autocast: bool, times: int) -> None:
    """With the plain path's loss and gradients, as far as bf16 tells."""
    expected = step(nn.Linear, False, autocast)
    actual = step(kind, True, autocast)

    assert expected[0] == pytest.approx(actual[0], rel=2e-2)
    for gradient, other in zip(expected[1:3], actual[1:3], strict=True):
        assert (torch.float32 if autocast else torch.bfloat16) == other.dtype
        error = float((gradient.float() - other.float()).norm())
        assert error <= 5e-2 * float(gradient.float().norm())
    assert expected[3] >= times * actual[3]
