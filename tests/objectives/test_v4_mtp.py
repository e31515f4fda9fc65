"""DeepSeek-V4's heads for multi-token prediction, beside their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import v4
import v4_oracle as oracle
from torch import Tensor

from torchturbo.objectives.mtp.deepseek_v4 import DeepseekV4Heads
from torchturbo.objectives.taps import Taps

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])


def by_formula(state: Tensor, embedded: list[Tensor], weights: dict[str, Tensor], sizes: Any, positions: Any) -> Any:
    """Return the hidden states [T, H] of each depth of one row of streams [T, hc, H]."""
    begins = [at - position for at, position in enumerate(positions)]
    hidden = []
    for number, following in enumerate(embedded):
        mine = oracle.of_block(weights, number)
        e = oracle.rms(following, mine["enorm.weight"]) @ mine["e_proj.weight"].T
        h = oracle.rms(state, mine["hnorm.weight"]) @ mine["h_proj.weight"].T
        state = oracle.block(
            e[:, None] + h,
            positions,
            lambda t, own: own[max(begins[t], t - sizes.sliding_window + 1) : t + 1],
            mine,
            sizes,
        )
        hidden.append(oracle.rms(oracle.joined(state, mine, sizes), mine["norm.weight"]))
    return hidden


def test_two_depths_are_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states, and gradients of every tensor of both heads, of the embeddings and of the model's streams."""
    base = v4.double(v4.model().train())
    heads = v4.stir(DeepseekV4Heads(base.config, 2), 3).double()
    taps = Taps(base, base)
    calls = {name: taps.watch(module) for name, module in heads.watched(base).items()}
    weights = v4.named(heads)
    embedded = [torch.randn(1, 10, v4.HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found: dict[str, Tensor] = {}

    def run(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        state = heads.first(calls)
        assert state.grad_fn is not None
        found["state"] = state.detach().requires_grad_()
        found["first"], found["one"] = heads.depth(0, found["state"], embedded[0], calls)
        _, found["two"] = heads.depth(1, found["first"], embedded[1], calls)

    with v4.in_double(monkeypatch):
        base._forward_hooks.clear()
        base.register_forward_hook(run, with_kwargs=True)
        base(**v4.batch(1, 10, position_ids=PACKED), use_cache=False)
        pull = [torch.randn_like(found[name]) for name in ("one", "two")]
        got = [found["one"], found["two"]]
        leaves = [found["state"], *embedded, *heads.parameters()]
        gradients = torch.autograd.grad(sum((a * b).sum() for a, b in zip(got, pull, strict=True)), leaves)
    state = found["state"].detach()[0].requires_grad_()
    rows = [one.detach()[0].requires_grad_() for one in embedded]
    expected = by_formula(state, rows, weights, base.config, PACKED[0].tolist())
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one[0], two, rtol=1e-6, atol=1e-9)
    total = sum((a * b[0]).sum() for a, b in zip(expected, pull, strict=True))
    theirs = torch.autograd.grad(total, [state, *rows, *weights.values()], allow_unused=True)
    for one, two in zip(gradients[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one[0], two, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        for parameter, gradient in zip(heads.parameters(), gradients[3:], strict=True):
            parameter.copy_(gradient)
    ours = v4.named(heads)
    for name, gradient in zip(weights, theirs[3:], strict=True):
        if not name.endswith("gate.bias"):  # which only chooses
            wanted = torch.zeros_like(ours[name]) if gradient is None else gradient
            torch.testing.assert_close(ours[name].detach(), wanted, rtol=1e-6, atol=1e-9, msg=name)
