"""The chunked loss at full size on a CUDA device: 8,192 tokens over a vocabulary of 151,936, in bf16."""

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

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = kind(WIDTH, TOKENS, bias=False, device="cuda", dtype=torch.bfloat16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor, labels: Any = None) -> Any:
        logits = self.head(hidden)
        return ForCausalLMLoss(logits, labels, TOKENS), logits


def step(kind: type[nn.Linear], chunks: bool) -> tuple[float, Tensor, Tensor, int]:
    """Return loss, the gradients of hidden states and weight, and the peak less what is held at the end, in bytes."""
    model = Model(kind)
    hidden = torch.randn(1, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(TOKENS, (1, ROWS), device="cuda")
    if chunks:
        chunked.install(model, 1024)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = model(hidden, labels=labels)[0]
    loss.backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    assert hidden.grad is not None and model.head.weight.grad is not None
    return float(loss.detach()), hidden.grad, model.head.weight.grad, torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize("kind", [nn.Linear, OtherLinear], ids=["gradient in forward", "recompute"])
def test_the_full_shape_fits_in_a_sixth_of_the_logits_memory(kind: type[nn.Linear]) -> None:
    """With the plain path's loss and gradients, as far as bf16 tells."""
    expected = step(nn.Linear, chunks=False)
    actual = step(kind, chunks=True)

    assert expected[0] == pytest.approx(actual[0], rel=2e-2)
    for gradient, other in zip(expected[1:3], actual[1:3], strict=True):
        error = float((gradient.float() - other.float()).norm())
        assert error <= 5e-2 * float(gradient.float().norm())
    assert expected[3] >= 6 * actual[3]
