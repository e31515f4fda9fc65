"""The head of a chunked loss at other work in a training forward: real logits for a draft head, losses beside the own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_chunked_loss import assert_same
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from torchturbo.objectives import chunked


class Drafting(nn.Module):
    """A head and Transformers' loss under a learned scale, and a draft head's loss against the teacher's logits."""

    def __init__(self, main: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.draft = nn.Linear(4, 11), nn.Linear(4, 11)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.main = main

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor, labels: Any = None) -> tuple[Any, ...]:
        logits = self.head(hidden) * self.scale
        target = functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        with chunked.real_logits(self):
            teacher = self.head(hidden)
            distance = (teacher.softmax(-1) - self.draft(hidden).softmax(-1)).square().sum()
            beside = self.head.loss(hidden.flatten(0, 1), target) if hasattr(self.head, "loss") else 0
        assert type(teacher) is Tensor
        loss = ForCausalLMLoss(logits, labels, 11) if self.main else self.draft(hidden).sum()
        return loss + distance + 0 * beside, logits


def test_a_head_gives_logits_beside_its_own_loss() -> None:
    """To a draft head in the midst of a training forward; its own loss stays in chunks, and all gradients the same."""
    hidden, labels = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(10).view(2, 5)
    plain, prepared = Drafting(), Drafting()
    chunked.install(prepared, 3)
    results = []
    for model in (plain, prepared):
        loss, logits = model(hidden, labels=labels)
        loss.backward()
        results.append((float(loss.detach()), {name: value.grad for name, value in model.named_parameters()}))

    assert logits is None
    assert_same(*results)
    assert chunked.recomputes(prepared)  # for the scale


def test_a_loss_beside_the_models_own_does_not_pass_for_it() -> None:
    """The model's went past the head."""
    model = Drafting(main=False)
    chunked.install(model, 3)

    with pytest.raises(RuntimeError, match="computed its loss past the head"):
        model(torch.randn(2, 5, 4), labels=torch.arange(10).view(2, 5))
