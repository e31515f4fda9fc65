"""Block diffusion at length 4,096 on a CUDA device: flex attention beside sdpa, in numbers and in memory."""

from __future__ import annotations

from typing import Any

import diffusing
import pytest
import torch
from diffusing import noise, ragged

from torchturbo.objectives.diffusion.objective import BlockDiffusion

LENGTH = 4096

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def run(kind: str, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return loss, gradients and the peak of memory of one step of four layers."""
    settings = {"head_dim": 32, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    model = diffusing.model(attn_implementation=kind, **settings).cuda().train()
    BlockDiffusion(model, model, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = model(**batch).loss
    loss.backward()
    torch.cuda.synchronize()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(loss.detach()), gradients, torch.cuda.max_memory_allocated()


def test_flex_attention_is_sdpa_without_a_dense_mask() -> None:
    """The dense float32 mask of two rows is 512 MiB: a step of flex attention takes at least half of that less."""
    doubled = noise(block_size=32)(ragged([LENGTH, 3000]), 0)
    batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in doubled.items()}
    run("flex_attention", batch)  # compiles
    loss, gradients, peak = run("flex_attention", batch)
    expected, plain, dense = run("sdpa", batch)

    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in plain.items():
        assert float((gradients[name] - gradient).norm()) < 1e-2 * float(gradient.norm()), name
    assert dense - peak > 4 * (2 * LENGTH) ** 2
