"""Expert parallelism on every mesh, beside FSDP2, sequence parallelism and recomputation, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import mixtures
import parity
import pytest
import torch
from ranks import run_ranks

RECOMPUTED: dict[str, dict[str, bool]] = {
    "kept": {"enabled": False},
    "reentrant": {"enabled": True, "use_reentrant": True},
    "non-reentrant": {"enabled": True, "use_reentrant": False},
}
"""What becomes of activations."""
Case = tuple[str, int, int, str, int]
"""Model, sp_size, ep_size, what becomes of activations, accumulation."""


def hold(rank: int, world_size: int, cases: list[Case]) -> None:
    for kind, sp_size, ep_size, activations, accumulation in cases:
        settings = parity.config(
            parallel_plan={"sp_size": sp_size, "ep_size": ep_size},
            activation_checkpointing=RECOMPUTED[activations],
        )
        window = parity.batches(accumulation * world_size // sp_size, 2, 12)
        try:
            parity.check(rank, world_size, partial(mixtures.build, kind), settings, window)
        except Exception as error:
            raise AssertionError((kind, sp_size, ep_size, activations, accumulation)) from error


PAIRS: dict[int, list[Case]] = {
    2: [
        ("qwen3_moe", 1, 2, "reentrant", 3),
        ("qwen3_moe", 1, 2, "non-reentrant", 1),
        ("gpt_oss", 1, 2, "reentrant", 1),
        ("deepseek_v3", 1, 2, "non-reentrant", 3),
        ("qwen3_moe", 1, 1, "non-reentrant", 1),
        ("qwen3_moe", 2, 2, "kept", 1),
        ("mixtral", 2, 2, "reentrant", 3),
        ("glm4_moe", 2, 2, "non-reentrant", 1),
    ],
    4: [
        ("qwen3_moe", 1, 2, "kept", 1),
        ("gpt_oss", 1, 2, "non-reentrant", 3),
        ("qwen3_moe", 1, 4, "reentrant", 1),
        ("qwen3_moe", 2, 2, "non-reentrant", 1),
        ("mixtral", 2, 4, "reentrant", 1),
        ("deepseek_v3", 1, 4, "kept", 3),
    ],
}


@pytest.mark.parametrize("world_size", PAIRS)
def test_every_mesh_computes_the_same(world_size: int) -> None:
    """Each value of each column with most values of the others; ``ep_fsdp`` is 1 and 2."""
    run_ranks(world_size, hold, world_size, PAIRS[world_size])


@pytest.mark.full
@pytest.mark.parametrize("activations", RECOMPUTED)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "gpt_oss"])
def test_the_whole_grid(kind: str, world_size: int, activations: str) -> None:
    """Every mesh with every kind of recomputation; gpt-oss's attention takes no divided sequences."""
    sizes = [size for size in (1, 2, 4) if size <= world_size]
    grid = [
        (kind, sp_size, ep_size, activations, accumulation)
        for sp_size, ep_size, accumulation in product(sizes if kind != "gpt_oss" else [1], sizes, (1, 3))
    ]
    run_ranks(world_size, hold, world_size, grid)


# ---- loads that are as uneven as can be ----


def one_sided(implementation: str, kind: str) -> Any:
    """Return a model whose tokens all choose two of the first rank's experts."""
    model = mixtures.build(kind)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "router.bias")):
                tensor.copy_(torch.tensor([50.0, 50.0] + [0.0] * 6))
    return model


def hold_one_sided(rank: int, world_size: int, ep_size: int) -> list[int]:
    received: list[int] = []
    from torchturbo.parallel import dispatch

    counted = dispatch.exchange_counts

    def watch(*args: Any) -> Any:
        counts = counted(*args)
        received.append(sum(counts.received))
        return counts

    dispatch.exchange_counts = watch
    for kind, implementation in product(("deepseek_v3", "gpt_oss"), ("grouped_mm", "eager")):
        settings = parity.config(parallel_plan={"ep_size": ep_size})
        make: Callable[[], Any] = partial(one_sided, implementation, kind)
        parity.check(rank, world_size, make, settings, parity.batches(world_size, 2, 8))
    return received


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_tokens_go_to_one_rank(world_size: int) -> None:
    """The others compute nothing, and take part in every collective of forward and backward."""
    received = run_ranks(world_size, hold_one_sided, world_size, world_size)

    assert all(received[0])
    assert not any(any(of_rank) for of_rank in received[1:])


# ---- what is trained, and how ----


def dominated() -> Any:
    """Return a model in which the last expert's gradient is most of the norm."""
    model = mixtures.build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[-1] *= 100
    return model


def frozen_experts() -> Any:
    model = mixtures.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


def experts_alone() -> Any:
    """Return a model whose experts are trained and nothing else: tokens need no gradient in the first layer."""
    model = mixtures.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    return model


def hold_models(rank: int, world_size: int) -> None:
    for make, activations in product((dominated, frozen_experts, experts_alone), RECOMPUTED):
        settings = parity.config(parallel_plan={"ep_size": 2}, activation_checkpointing=RECOMPUTED[activations])
        try:
            parity.check(rank, world_size, make, settings, parity.batches(world_size, 2, 8))
        except Exception as error:
            raise AssertionError((make.__name__, activations)) from error


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_trained(world_size: int) -> None:
    """Frozen experts, trained ones alone, and one whose gradient outweighs all others in the norm that clips.

    ``ep_fsdp`` 1 and 2: https://github.com/ByteDance-Seed/VeOmni/pull/205 divided by another size.
    """
    run_ranks(world_size, hold_models, world_size)


def hold_halves(rank: int) -> None:
    """In bf16 a router may choose otherwise, so only the loss is compared."""
    make = partial(mixtures.build, "mixtral")
    settings = parity.config(parallel_plan={"ep_size": 2}, mixed_precision="bf16")
    model, window = make(), parity.batches(2)
    expected = parity.reference(model, window)
    engine = parity.prepared(model, settings, 2, rank)
    seen = set()
    experts = model.model.layers[0].mlp.experts
    experts.act_fn.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    found = parity.step(engine, model, parity.share(window, 2, 1, rank))
    assert {torch.bfloat16} == seen
    assert abs(found.loss - expected.loss) < 2e-2 * expected.loss
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
    assert {torch.float32} == {gradient.dtype for gradient in found.gradients.values()}


def test_bf16() -> None:
    """Experts compute in the format that FSDP2 gathers them in; gradients are float32."""
    run_ranks(2, hold_halves)


def hold_evaluation(rank: int) -> None:
    model, (batch,) = mixtures.build(), parity.batches(1)
    with torch.no_grad():
        expected = model.eval()(**batch).logits
    parity.prepared(model, parity.config(parallel_plan={"ep_size": 2}), 2, rank)
    mine = {name: value[: 1 + rank] for name, value in batch.items()}  # one row on rank 0, two on rank 1
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**mine).logits, expected[: 1 + rank], rtol=1e-5, atol=1e-6)


def test_evaluation() -> None:
    """Without gradients, and with another number of tokens on each rank."""
    run_ranks(2, hold_evaluation)


def doubled(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute with the weights that can be seen, like an operator that replaces a module's forward."""
    from transformers.integrations.moe import batched_mm_experts_forward

    assert {self.num_experts} == {len(value) for value in self.parameters()}
    return 2 * batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


def with_operator() -> Any:
    model = mixtures.build()
    for layer in model.model.layers:
        vars(layer.mlp.experts)["forward"] = MethodType(doubled, layer.mlp.experts)
    return model


def with_adapters() -> Any:
    """Return a model whose attention has LoRA, with numbers in what starts as zeros; the experts are frozen."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(mixtures.build(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def hold_made(rank: int, make: Callable[[], Any]) -> None:
    for activations in RECOMPUTED:
        settings = parity.config(parallel_plan={"ep_size": 2}, activation_checkpointing=RECOMPUTED[activations])
        parity.check(rank, 2, make, settings, parity.batches(2, 2, 8))


def test_an_operator_computes_a_ranks_experts() -> None:
    """Whatever forward a module has when its experts are divided, with the parameters of this rank alone."""
    run_ranks(2, hold_made, with_operator)


def test_adapters_train_beside_divided_experts() -> None:
    """LoRA on attention: tokens' gradients pass frozen experts of other ranks."""
    run_ranks(2, hold_made, with_adapters)
