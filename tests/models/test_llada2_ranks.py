"""LLaDA2-MoE on two ranks and with the savers of memory against one process: loss and every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import parity, tiny
from tests.models import llada2_tiny as llada2
from tests.ranks import run_ranks

CHUNKED = {"loss_chunk": {"enabled": True, "chunk_size": 5}}
CHECKPOINTED = {"activation_checkpointing": {"enabled": True}}
SETTINGS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "experts divided": {"parallel_plan": {"ep_size": 2}},
    "sequences divided": {"parallel_plan": {"sp_size": 2}},
    "experts divided, checkpointed, in chunks": {"parallel_plan": {"ep_size": 2}, **CHUNKED, **CHECKPOINTED},
    "sequences divided, checkpointed, in chunks": {"parallel_plan": {"sp_size": 2}, **CHUNKED, **CHECKPOINTED},
}

SPREAD = 0.02
"""Deviation of the weights, as in training's first step: the largest error is 6e-7 then. With ten times that, the
float32 of the loss alone moves small gradients by 2e-6; where it is float64, 3e-8 are left."""


def masked(window: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return micro-batches with a mask: of pairs, and in the second one of padding."""
    generator = torch.Generator().manual_seed(6)
    for batch in window:
        rows, length = batch["input_ids"].shape
        allowed = torch.rand(rows, 1, length, length, generator=generator) > 0.4
        allowed |= torch.eye(length, dtype=torch.bool)
        least = torch.finfo(torch.float32).min
        batch["attention_mask"] = torch.zeros(allowed.shape).masked_fill(~allowed, least)
    window[1]["attention_mask"] = torch.ones_like(window[1]["input_ids"])
    window[1]["attention_mask"][0, -3:] = 0
    return window


def hold(rank: int, world_size: int, implementation: str) -> None:
    for name, settings in SETTINGS.items():
        for length in (12, 15) if "sequences" in name else (12,):  # 15 tokens do not divide
            window = masked(parity.batches(4, 2, length))  # as many for each rank
            try:
                parity.check(
                    rank,
                    world_size,
                    partial(llada2.model, SPREAD, attn_implementation=implementation),
                    parity.config(**settings),
                    window,
                )
            except Exception as error:
                raise AssertionError(f"{name}, {length} tokens") from error


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.full)])
def test_two_ranks_compute_what_one_process_does(implementation: str) -> None:
    run_ranks(2, hold, 2, implementation)


def test_recomputed_layers_and_a_loss_in_chunks_change_nothing() -> None:
    """In one process; the heads of the model are tied here."""
    window = masked(parity.batches(3, 2, 12))
    model = llada2.model(tie_word_embeddings=True)
    expected = parity.reference(model, window)
    engine = parity.prepared(model, parity.config(**CHUNKED, **CHECKPOINTED))

    parity.assert_equal(parity.step(engine, model, window), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_own_checkpointing_works(reentrant: bool) -> None:
    ids = torch.arange(3, 15)[None]

    def gradients(checkpointed: bool) -> dict[str, Tensor]:
        model = llada2.model().train()
        if checkpointed:
            model.enable_input_require_grads()
            tiny.checkpoint(model, reentrant)
        model(ids, labels=ids).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    expected, found = gradients(False), gradients(True)

    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
