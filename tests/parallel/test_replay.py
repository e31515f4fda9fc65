"""Routing in recomputation: what the forward pass chose, whatever has become of the scores since."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mixtures
import parity
import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchturbo.engine.context import Context
from torchturbo.engine.steps import activation_checkpointing
from torchturbo.parallel.experts import find_experts
from torchturbo.parallel.replay import Replayed, recomputing, remember, replayed

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def forms(scores: Tensor) -> list[Tensor]:
    """Return what every way of choosing among scores [3, 4] gives."""
    return [
        *torch.topk(scores, 2),
        *torch.topk(scores, 2, -1, True, False),
        *torch.topk(input=scores, k=3, dim=0, largest=False, sorted=False),
        *scores.topk(k=1),
        *scores.topk(2, dim=1, sorted=True),
        *torch.max(scores, 1),
        *scores.max(dim=-1, keepdim=True),
        scores.max(-1).values,
        scores.max(dim=0)[1],
        scores.argmax(-1),
        torch.argmax(scores, dim=0, keepdim=True),
        scores.max(),
        torch.max(scores, scores.flip(0)),
        scores.argmax(),
        scores.view(3, 2, 2).topk(1, dim=-1)[0].sum(-1),
    ]


def test_every_way_of_choosing_gives_what_torch_gives() -> None:
    """Values, indices, shapes and the gradient that reaches the scores, bit for bit."""
    scores, others = (torch.randn(3, 4, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in "ab")
    expected, found = forms(scores), Replayed(forms, 4)(others)

    assert len(expected) == len(found)
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(expected, found, strict=True))
    for results in (expected, found):
        sum((value * (at + 1)).sum() for at, value in enumerate(results) if value.requires_grad).backward()  # type: ignore[union-attr]
    assert torch.equal(scores.grad, others.grad)  # type: ignore[arg-type]


def test_a_later_call_repeats_the_indices_and_takes_the_values_of_its_own_scores() -> None:
    """Of opposite scores a router would choose the opposite."""
    first = torch.randn(3, 4)
    call = Replayed(lambda scores: torch.topk(scores, 2, dim=-1, sorted=False), 4)
    values, indices = call(first)
    again, same = call(-first)

    assert torch.equal(indices, same)
    assert torch.equal(-values, again)
    assert type(call(first)) is type(torch.topk(first, 2))


def test_what_chooses_among_more_than_the_experts_is_left_alone() -> None:
    """A sparse attention's index is no routing, and its choices would take memory."""
    call = Replayed(lambda scores: scores.topk(1).indices, 4)
    call(torch.arange(5.0))

    assert 0 == int(call(-torch.arange(5.0)))


def test_a_model_may_change_the_indices_it_got() -> None:
    """What is noted is a copy."""

    def change(scores: Tensor) -> Tensor:
        with torch.no_grad():
            return scores.topk(2).indices.add_(1)

    call = Replayed(change, 4)

    assert torch.equal(call(torch.arange(4.0)), call(torch.zeros(4)))


def test_more_choices_than_were_noted_are_an_error() -> None:
    """A layer that takes another path can't be recomputed."""
    times = iter((1, 2))
    call = Replayed(lambda scores: [scores.argmax(-1) for _ in range(next(times))], 4)
    call(torch.zeros(4))

    with pytest.raises(RuntimeError, match="more choices than the forward pass, which made 1"):
        call(torch.zeros(4))


def test_a_call_inside_another_repeats_too() -> None:
    """An outer recomputation makes the inner call anew: that repeats what the outer call has noted."""
    made = iter("abc")

    def outer(scores: Tensor) -> tuple[Tensor, str]:
        inner = Replayed(lambda value: (value.argmax(-1), remember(lambda: next(made))), 4)
        first, again = inner(scores), inner(-scores)
        assert first == again
        return first

    call = Replayed(outer, 4)

    assert call(torch.arange(4.0)) == call(-torch.arange(4.0)) == (3, "a")
    assert not recomputing()


def test_what_is_compiled_stays_in_one_graph() -> None:
    """Compiled operators of a layer are called under the mode, which torch.compile traces."""
    gated = torch.compile(lambda gate, up: nn.functional.silu(gate) * up, backend="eager", fullgraph=True)
    scores = torch.randn(3, 4)
    call = Replayed(lambda value: (gated(value, value), value.argmax(-1)), 4)

    first, again = call(scores), call(-scores)
    assert torch.equal(nn.functional.silu(scores) * scores, first[0])
    assert torch.equal(first[1], again[1])


def test_nothing_is_noted_outside_of_a_checkpointed_call() -> None:
    """Evaluation routes each time."""
    made = iter("ab")

    assert ["a", "b"] == [remember(lambda: next(made)), remember(lambda: next(made))]


# ---- whole models ----


def checkpointed(model: Any, reentrant: bool, enabled: bool = True) -> Any:
    settings = parity.config(activation_checkpointing={"enabled": enabled, "use_reentrant": reentrant})
    activation_checkpointing.apply(model, settings, Context())
    return model.train()


def choices_of(model: Any) -> dict[nn.Module, list[Tensor]]:
    """Return the lists in which every call of every layer's experts notes what its tokens chose."""
    seen: dict[nn.Module, list[Tensor]] = {module: [] for module in find_experts(model).values()}
    for module in seen:
        module.register_forward_pre_hook(lambda module, args: seen[module].append(args[1].clone()))
    return seen


def routers(model: Any) -> list[Tensor]:
    return [value for name, value in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]


def tie(model: Any) -> Any:
    """Give every expert of every token the same score."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "gate.weight" in name or "router." in name or "e_score_correction_bias" in name:
                tensor.zero_()
    return model


@contextmanager
def other_order_each_time(size: float = 1e-6) -> Iterator[None]:
    """Let every call of topk prefer other experts among tied ones, as other kernels of an accelerator would."""
    original, calls = torch.topk, [0]

    def topk(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        preference = torch.linspace(0, size, input.shape[-1]).roll(calls[0])
        return original(input + preference, *args, **kwargs)

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = original  # type: ignore[assignment]


def gradients(model: Any, *batches: parity.Batch) -> dict[str, Tensor]:
    for batch in batches:
        model(**batch).loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def furthest(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient."""
    assert expected.keys() == found.keys()
    floor = 1e-6 * max(float(value.norm()) for value in expected.values())
    return max(float((expected[name] - found[name]).norm() / (expected[name].norm() + floor)) for name in expected)


@KINDS
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_tied_scores_are_no_new_choice(kind: str, reentrant: bool) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3325: each recomputation would take other experts."""
    model, (batch,) = tie(mixtures.build(kind)), parity.batches(1)
    again = checkpointed(copy.deepcopy(model), reentrant)
    seen = choices_of(again)
    with other_order_each_time():
        expected = gradients(checkpointed(model, reentrant, enabled=False), batch)
    with other_order_each_time():
        found = gradients(again, batch)

    assert all(len(calls) == 2 and torch.equal(*calls) for calls in seen.values())
    assert furthest(expected, found) < 1e-3  # the scores themselves differ by the preference


@KINDS
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_weights_that_change_before_backward_choose_nothing_new(kind: str, reentrant: bool) -> None:
    """The second pass sees the opposite scores; shapes stay, and so does the gradient's graph.

    https://github.com/pytorch/torchtitan/issues/1117: "recomputed values have different metadata".
    """
    model, (batch,) = checkpointed(mixtures.build(kind), reentrant), parity.batches(1)
    seen = choices_of(model)
    loss = model(**batch).loss
    with torch.no_grad():
        for weight in routers(model):
            weight.neg_()
    loss.backward()

    assert all(len(calls) == 2 and torch.equal(*calls) for calls in seen.values())
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in routers(model))


@KINDS
def test_forward_and_backward_passes_in_any_order(reentrant: bool) -> None:
    """Two forward passes, and their backward passes in either order."""
    first, second = parity.batches(1, seed=1) + parity.batches(1, seed=2)
    expected = gradients(checkpointed(mixtures.build(), reentrant, enabled=False), first, second)
    for backwards in (False, True):
        model = checkpointed(mixtures.build(), reentrant)
        losses = [model(**batch).loss for batch in (first, second)]
        for loss in reversed(losses) if backwards else losses:
            loss.backward()
        assert furthest(expected, {name: value.grad for name, value in model.named_parameters()}) < 2e-6


@KINDS
def test_what_counts_tokens_counts_them_once(reentrant: bool) -> None:
    """An expert's load is the same with recomputation and without: https://github.com/NVIDIA-NeMo/Automodel/pull/3140."""
    loads = []
    for enabled in (False, True):
        model, (batch,) = checkpointed(mixtures.build(), reentrant, enabled), parity.batches(1)
        load = torch.zeros(mixtures.E)
        for module in find_experts(model).values():

            def count(module: nn.Module, args: Any, load: Tensor = load) -> None:
                if not recomputing():
                    load += args[1].flatten().bincount(minlength=mixtures.E)

            module.register_forward_pre_hook(count)
        gradients(model, batch)
        loads.append(load)

    assert torch.equal(*loads)
    assert loads[0].sum() == 2 * 2 * batch["input_ids"].numel()  # layers, choices, tokens


def test_routing_that_changes_scores_in_place() -> None:
    """Qwen3-MoE divides its scores in place: keeping them instead of indices gave wrong gradients, or an error."""
    (batch,) = parity.batches(1)
    expected = gradients(checkpointed(mixtures.build(norm_topk_prob=True), False, enabled=False), batch)
    found = gradients(checkpointed(mixtures.build(norm_topk_prob=True), False), batch)

    assert furthest(expected, found) < 2e-6


def test_dense_layers_are_checkpointed_as_ever() -> None:
    """No mode and no notes where no token chooses."""
    model = checkpointed(mixtures.build("deepseek_v3"), False)
    dense, mixed = (vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers)

    assert getattr(dense, "func", None) is checkpoint
    assert getattr(mixed, "func", None) is replayed


@KINDS
def test_experts_in_a_list_are_replayed_too(reentrant: bool) -> None:
    """Models with code of their own hold each expert in a module of its own."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.chosen: list[Tensor] = []

        def forward(self, rows: Tensor) -> Tensor:
            scores, index = self.gate(rows).softmax(-1).topk(1, dim=-1)
            self.chosen.append(index)
            every = torch.stack([expert(rows) for expert in self.experts], -2)
            return (every.gather(-2, index[..., None].expand(*index.shape, 32)) * scores[..., None]).sum(-2)

    model, (batch,) = tiny.model(), parity.batches(1)
    for layer in model.model.layers:
        layer.mlp = Mixture()
    checkpointed(model, reentrant)
    loss = model(**batch).loss
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.neg_()
    loss.backward()

    assert all(torch.equal(*layer.mlp.chosen) for layer in model.model.layers)


def hold_diverging(rank: int, reentrant: bool) -> None:
    """Divide experts, and let one rank's router prefer others each time."""
    ep = {"ep_size": 2}
    window = parity.batches(2, seed=3)
    steps = []
    for enabled in (False, True):
        section = {"enabled": enabled, "use_reentrant": reentrant}
        settings = parity.config(parallel_plan=ep, activation_checkpointing=section)
        model = tie(mixtures.build("deepseek_v3"))
        engine = parity.prepared(model, settings, 2, rank)
        with other_order_each_time() if rank == 0 else nullcontext():
            steps.append(parity.step(engine, model, parity.share(window, 2, 1, rank)))
    assert steps[0].loss == steps[1].loss
    assert furthest(steps[0].gradients, steps[1].gradients) < 1e-3


@KINDS
def test_ranks_exchange_in_recomputation_what_they_exchanged_before(reentrant: bool) -> None:
    """https://github.com/ByteDance-Seed/VeOmni/issues/979: tokens that are routed anew are other rows for other ranks."""
    run_ranks(2, hold_diverging, reentrant)


def hold_counts(rank: int) -> int:
    from torchturbo.parallel import dispatch

    exchanged = dispatch.exchange_counts
    calls = []
    dispatch.exchange_counts = lambda *args: calls.append(args) or exchanged(*args)  # type: ignore[func-returns-value]
    settings = parity.config(parallel_plan={"ep_size": 2}, activation_checkpointing={"enabled": True})
    model = mixtures.build()
    engine = parity.prepared(model, settings, 2, rank)
    parity.step(engine, model, parity.share(parity.batches(2), 2, 1, rank))
    return len(calls)


def test_recomputation_asks_for_no_counts() -> None:
    """The host waits for the device once a layer, in the forward pass alone."""
    assert [2, 2] == run_ranks(2, hold_counts)
