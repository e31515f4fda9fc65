"""Loss terms of the normaliser: coefficients, shares of a group's mean, and metrics that are ratios."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor

from torchturbo.objectives.normalise import Normaliser, Term


def term(**settings: Any) -> Term:
    """Return a term that is the sum of squared logits, weighted by the tokens."""
    return Term(
        "squares",
        lambda outputs, batch: outputs.logits.square().sum(),
        lambda batch: torch.tensor(float(batch["input_ids"].numel())),
        **settings,
    )


def gradients(coefficient: float | None) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return loss, gradients and metrics of one step with a term, or without any."""
    model = tiny.model()
    engine = parity.prepared(model, parity.config())
    if coefficient is not None:
        engine.context.normaliser.terms.append(term(coefficient=coefficient))
    found = parity.step(engine, model, parity.batches(2))
    return found.loss, found.gradients, engine.context.normaliser.term_metrics(1, torch.device("cpu"))


def test_a_coefficient_weighs_the_loss_and_not_the_metric() -> None:
    """The gradient is linear in it; what is logged is the plain value."""
    plain, once, twice = gradients(None), gradients(1.0), gradients(2.0)

    assert once[2] == twice[2]
    assert plain[0] + 2 * once[2]["squares"] == pytest.approx(twice[0], rel=1e-6)
    for name, gradient in plain[1].items():
        torch.testing.assert_close(twice[1][name] - gradient, 2 * (once[1][name] - gradient), rtol=1e-4, atol=2e-6)


def test_coefficient_zero_logs_and_leaves_every_bit() -> None:
    """The value is computed without a graph."""
    plain, nothing, once = gradients(None), gradients(0.0), gradients(1.0)

    assert plain[0] == nothing[0]
    assert once[2] == nothing[2]
    assert all(torch.equal(gradient, nothing[1][name]) for name, gradient in plain[1].items())


def shared(rank: int, sp_size: int) -> tuple[float, float]:
    """Return a mean term's part of the loss, summed over ranks, and its metric: each rank has its share of a value."""
    normaliser = Normaliser(2, summed=True, sp_size=sp_size)
    value = torch.tensor([1.0, 2.0])[rank] if sp_size == 2 else torch.tensor(3.0)
    normaliser.terms = [Term("pooled", lambda outputs, batch: value, pooled=True)]
    normaliser.micro_batches = 1
    loss = normaliser._with_term(torch.zeros(()), normaliser.terms[0], None, {})
    total = loss.clone()
    torch.distributed.all_reduce(total)
    normaliser._terms_met = True
    return float(total), normaliser.term_metrics(1, torch.device("cpu"))["pooled"]


@pytest.mark.parametrize("sp_size", [1, 2])
def test_shares_of_a_group_add_up_to_a_mean_over_micro_batches(sp_size: int) -> None:
    """Two ranks share one micro-batch (1 + 2), or have one each (3 and 3): the mean is 3."""
    assert [(3.0, 3.0)] * 2 == run_ranks(2, shared, sp_size)


def counted(rank: int) -> dict[str, float]:
    """Return the metrics after each rank has counted something of its own."""
    normaliser = Normaliser(2)
    normaliser.terms = [Term("term", lambda outputs, batch: None)]
    normaliser.ratios, normaliser._terms_met = ["rate", "nothing"], True
    for hits in (1.0, 2.0):
        normaliser.ratio("rate", torch.tensor(hits + rank), torch.tensor(4.0))
    first = normaliser.term_metrics(2, torch.device("cpu"))
    assert {"term": 0.0} == normaliser.term_metrics(1, torch.device("cpu"))  # begun anew
    return first


def test_a_ratio_is_one_quotient_of_sums() -> None:
    """Over ranks and steps; a ratio of nothing is left out."""
    assert [{"term": 0.0, "rate": 8 / 16}] * 2 == run_ranks(2, counted)
