"""What the objectives' benchmark makes of its figures: the limit, the programs, and what is held. Nothing here is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import objectives as benchmark  # noqa: E402
import objectives_steps as steps  # noqa: E402
import objectives_tensors as tensors  # noqa: E402

H, V, F = 512, 8192, 1408


def test_the_limit_of_multi_token_prediction_is_what_a_depth_multiplies() -> None:
    """A layer of latent attention and an MLP, the projection of two states to one, and the head once more."""
    attention = H * 256 + 256 * 8 * 64 + H * (128 + 32) + 128 * 8 * (32 + 64) + 8 * 64 * H
    layer = attention + 3 * H * F
    share = (layer + 2 * H * H + V * H) / (4 * layer + V * H)
    assert pytest.approx(share) == steps.share_of_a_depth()
    (limit,) = [found.limit for found in benchmark.comparisons() if found.name == "mtp"]
    assert round(1.2 * (1 + share), 3) == limit


@pytest.mark.parametrize("name", benchmark.NAMES)
def test_the_sides_of_a_pair_have_one_model_and_differ_in_the_keys(name: str) -> None:
    """Or, where a model is trained as another kind, in the fields that say so."""
    own, other = getattr(steps, name)()
    (kind, sizes), (other_kind, other_sizes) = (steps.MODELS[side.settings["kind"]] for side in (own, other))
    fields = {"is_diffusion_model": True, "mask_token_id": 2} if name == "diffusion" else {}
    assert (kind, sizes) == (other_kind, other_sizes | fields)
    assert fields or own.settings["keys"].items() > other.settings["keys"].items()


def test_a_draft_never_holds_more_than_a_chunk_of_logits_and_a_whole_tensor_of_them_would_be_seen() -> None:
    found = tensors.draft_logits()
    assert (tensors.CHUNK, tensors.CHUNK) == (found.found, found.limit)
    with tensors.Largest(lambda tensor: tensors.rows_of_logits(tensor, 7, {(5, 7)})) as largest:
        torch.ones(5, 7)
        torch.ones(1).expand(9, 7)
        assert 0 == largest.most
        torch.ones(2, 3, 7)
    assert 6 == largest.most


def test_flex_attention_s_mask_is_made_of_no_floats_and_a_dense_one_would_be_seen() -> None:
    found = tensors.diffusion_mask()
    assert 0 == found.found < found.limit
    from torchturbo.objectives.diffusion.mask import attention_mask, doubled_rule

    with tensors.Largest(lambda tensor: tensor.numel() if tensor.is_floating_point() else 0) as largest:
        attention_mask("sdpa", doubled_rule(None, 64, 32), 1, 128, torch.float32, torch.device("cpu"))
    assert 128**2 == largest.most
