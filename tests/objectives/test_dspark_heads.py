"""Markov and confidence heads: each kind against its formula, slot after slot."""

from __future__ import annotations

from types import SimpleNamespace

import dspark_models
import pytest
import torch

from torchturbo.objectives.dspark.confidence import ConfidenceHead
from torchturbo.objectives.dspark.markov import KINDS


@pytest.mark.parametrize("kind", list(KINDS))
def test_latents_are_those_of_one_slot_after_the_other(kind: str) -> None:
    """Value and gradient, float64; W2 makes the bias of them."""
    torch.manual_seed(0)
    head = KINDS[kind](20, 4, 6).double()
    previous, hidden = torch.randint(0, 20, (2, 3, 5)), torch.randn(2, 3, 5, 6).double()
    draft = SimpleNamespace(markov_head=head)
    slow = [
        [torch.stack(dspark_models.latent(draft, tokens.tolist(), states)) for tokens, states in zip(*row, strict=True)]
        for row in zip(previous, hidden, strict=True)
    ]
    expected = torch.stack([torch.stack(row) for row in slow])

    found = head.latent(previous, hidden)

    torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-12)
    names, parameters = zip(*head.named_parameters(), strict=True)
    assert ("markov_w1.weight", "markov_w2.weight") == names[:2]
    assert (20, 4) == head.markov_w2.weight.shape
    assert head.markov_w2.bias is None
    ways = [torch.autograd.grad(way.cos().sum(), parameters, allow_unused=True) for way in (expected, found)]
    for one, two in zip(*ways, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_confidence_is_linear_and_wide() -> None:
    """In float32 whatever the states are, under autocast too; with or without the token before and a bias."""
    head = ConfidenceHead(6, 4).bfloat16()
    states, embedded = torch.randn(3, 6).bfloat16(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(states, embedded)
    row = torch.cat([states.float(), embedded.bfloat16().float()], -1)
    assert torch.float32 == found.dtype
    torch.testing.assert_close(row @ head.proj.weight.float()[0] + head.proj.bias.float(), found)
    plain = ConfidenceHead(6, bias=False)
    torch.testing.assert_close(states.float() @ plain.proj.weight[0], plain(states.float(), embedded))
