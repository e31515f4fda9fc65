"""Operators found in models: by structure, believed by a probe, and told why not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from torchturbo.ops.find import find

LAYERS = 2
EXPECTED: dict[str, dict[str, int]] = {
    "llama": {"attention": 2, "rope": 2, "swiglu": 2, "rms_norm": 5, "cross_entropy": 1},
    "qwen3": {"attention": 2, "rope": 2, "swiglu": 2, "rms_norm": 9, "cross_entropy": 1},
    "phi3": {"attention": 2, "rope": 2, "swiglu": 2, "rms_norm": 5, "cross_entropy": 1},
    "gemma3_text": {"attention": 2, "rope": 2, "rms_norm": 13, "cross_entropy": 1},
    "qwen3_moe": {"attention": 2, "rope": 2, "grouped_mm": 2, "rms_norm": 9, "cross_entropy": 1},
    "gpt2": {"attention": 2, "cross_entropy": 1},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_familys_operators_are_found_without_weights(kind: str) -> None:
    """On the meta device, as before the weights are read."""
    with torch.device("meta"):
        model = tiny.model(kind)

    assert EXPECTED[kind] == dict(Counter(site.op for site in find(model).sites))


def test_the_probe_tells_how_a_norm_computes() -> None:
    """Gemma multiplies by (1 + w) and rounds afterwards."""

    def facts(kind: str) -> Any:
        return {tuple(site.facts.items()) for site in find(tiny.model(kind)).of("rms_norm")}

    assert {(("eps", 1e-6), ("offset", 0.0), ("cast_first", True))} == facts("llama")
    assert {(("eps", 1e-6), ("offset", 1.0), ("cast_first", False))} == facts("gemma3_text")


@pytest.mark.parametrize(
    ("kind", "op", "reason"),
    [
        ("gemma3_text", "swiglu", "Gemma3MLP computes something else than down(silu(gate) * up)"),
        ("glm4", "rope", "Glm4Attention rotates otherwise than by halves"),
        ("deepseek_v3", "rope", "DeepseekV3Attention rotates in several ways"),
        ("gpt_oss", "rope", "GptOssAttention can't be probed"),
    ],
)
def test_what_only_looks_alike_is_left_and_told(kind: str, op: str, reason: str) -> None:
    """GELU, interleaved pairs, half-width angles."""
    with torch.device("meta"):
        found = find(tiny.model(kind))

    assert [] == found.of(op)
    assert [True] == [told.startswith(reason) for told in found.unproven[op]]


class LyingRMSNorm(nn.Module):
    """Has the name, the weight and the epsilon, and normalises by the mean of absolute values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_a_norm_that_lies_is_caught() -> None:
    """A class name is no proof."""
    model = tiny.model()
    model.model.norm = LyingRMSNorm(32)
    found = find(model)

    assert 4 == len(found.of("rms_norm"))
    assert ["LyingRMSNorm computes something else than RMSNorm"] == found.unproven["rms_norm"]


def test_an_mlp_with_another_part_is_left() -> None:
    """Its dropout does nothing in the probe and would be lost in training."""
    model = tiny.model()
    model.model.layers[0].mlp.dropout = nn.Dropout(0.5)
    found = find(model)

    assert 1 == len(found.of("swiglu"))
    assert "has other parts" in found.unproven["swiglu"][0]


def test_a_module_that_somebody_changed_is_left() -> None:
    """Its own forward may do what no probe of the class sees."""
    model = tiny.model()
    norm = model.model.norm
    norm.forward = norm.forward
    found = find(model)

    assert 4 == len(found.of("rms_norm"))
    assert ["LlamaRMSNorm has a forward of its own already"] == found.unproven["rms_norm"]


def test_looking_changes_nothing() -> None:
    """Neither weights nor the random state nor any module's own dictionary."""
    model = tiny.model("qwen3")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    owned = [dict(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    find(model)

    assert torch.equal(state, torch.get_rng_state())
    assert owned == [dict(vars(module)) for module in model.modules()]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
