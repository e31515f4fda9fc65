"""What FSDP2 is told: formats, what is frozen, unused or tied, one rank, and weights that ranks do not share."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
import tiny_vlm
import torch
from ranks import run_ranks
from torch import nn

from torchturbo.engine.backends.fsdp2.clip import clip_grad_norm
from torchturbo.engine.backends.fsdp2.shard import expert_shard_dim
from torchturbo.engine.backends.fsdp2.units import find_units

# ---- formats ----


def in_bf16(rank: int, kind: str, settings: Any) -> dict[str, float]:
    """Return the errors of a bf16 step on this rank against fp32 in one process, and look at the formats."""
    window = parity.batches(2)
    model = tiny.model(kind)
    expected = parity.reference(model, window)
    engine = parity.prepared(model, settings, 2, rank)
    seen: set[torch.dtype] = set()
    model.model.layers[0].self_attn.register_forward_hook(lambda _, __, out: seen.add(out[0].dtype))

    found = parity.step(engine, model, parity.share(window, 2, 1, rank))

    assert seen == {torch.bfloat16} and engine.context.autocast_dtype is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    return parity.errors(found, expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_bf16_computes_in_bf16_and_keeps_fp32(kind: str) -> None:
    """Masters and gradients stay fp32; a router may flip in bf16, so of experts only the loss is held."""
    for errors in run_ranks(2, in_bf16, kind, parity.config(mixed_precision="bf16")):
        assert errors["loss"] < 2e-2
        if kind == "llama":
            assert max(errors.values()) < 5e-2, errors


# ---- what is trained ----


def partly_frozen(rank: int, settings: Any) -> None:
    def make() -> Any:
        model = tiny.model()
        for name, parameter in model.named_parameters():  # a whole layer, and half of another unit
            parameter.requires_grad_("layers.0" not in name and "q_proj" not in name)
        return model

    parity.check(rank, 2, make, settings, parity.batches(2))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["off", "non-reentrant", "reentrant"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(reentrant: bool | None) -> None:
    """A frozen layer, and frozen and trained parameters in one unit."""
    checkpointing = {"enabled": reentrant is not None, "use_reentrant": bool(reentrant)}
    run_ranks(2, partly_frozen, parity.config(activation_checkpointing=checkpointing))


def unused(rank: int, kind: str, settings: Any) -> None:
    """Give an image to rank 0 alone."""
    window = [tiny_vlm.batch(kind, seed, image=seed == 0) for seed in range(2)]
    model = tiny_vlm.model(kind)
    expected = parity.reference(model, window)
    engine = parity.prepared(model, settings, 2, rank)
    assert engine.context.partly_used
    assert all("vision" not in layer.name and "visual" not in layer.name for layer in find_units(model).layers)

    found = parity.step(engine, model, [window[rank]])

    # What no batch reaches has no gradient in one process, and zeros where the ranks agree on what is unused.
    nothing = {name for name in found.gradients.keys() - expected.gradients.keys() if not found.gradients[name].any()}
    gradients = {name: gradient for name, gradient in found.gradients.items() if name not in nothing}
    parity.assert_equal(found._replace(gradients=gradients), expected)


@pytest.mark.parametrize("kind", ["llava", "mllama"])
def test_an_image_on_one_rank_ends_no_other(kind: str) -> None:
    """A tower, and cross-attention to it, is gathered with the root; the rank without an image adds zero."""
    run_ranks(2, unused, kind, parity.config())


# ---- one rank, several meshes ----


def test_a_group_of_one_divides_nothing() -> None:
    """The engine never shards one process without a reason; gradients are right there, too."""
    run_ranks(1, sharded_alone, parity.config())


def sharded_alone(rank: int, settings: Any) -> None:
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    window = parity.batches(2)
    model = tiny.model("qwen3_moe")
    expected = parity.reference(model, window)
    engine = Engine(settings, Context(world_size=1, rank=0))
    engine.context.sharded = True
    engine.prepare(model.train())
    parity.assert_equal(parity.step(engine, model, window), expected)


def clipped(rank: int) -> tuple[float, float, float]:
    """Clip gradients on three meshes and return the norm before, after, and of the whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_fsdp", "ep"))
    torch.manual_seed(1)
    values = [torch.randn(6, 5), torch.randn(4, 8, 5) * 9, torch.randn(3)]
    placed = [
        distribute_tensor(values[0], flat, [Shard(0)]),
        distribute_tensor(values[1], experts, [Shard(1), Shard(0)]),
    ]
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in [*placed, values[2]]]
    for parameter, value in zip(parameters, [*placed, values[2]], strict=True):
        parameter.grad = value.clone()
    before = clip_grad_norm(parameters, 0.5)
    return (
        float(before),
        float(clip_grad_norm(parameters)),
        float(torch.cat([value.flatten() for value in values]).norm()),
    )


def test_clipping_spans_meshes() -> None:
    """One norm over all of them, also where experts dominate, and every gradient scaled by it; torch refuses these."""
    for before, after, expected in run_ranks(4, clipped):
        assert before == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)


def test_without_gradients_the_norm_is_zero() -> None:
    """As where a step had no batch."""
    assert float(clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0)) == 0.0


# ---- weights and units ----


def started_apart(rank: int, settings: Any) -> Any:
    model = tiny.model(seed=rank)
    parity.prepared(model, settings, 2, rank)
    return parity.whole(model.model.layers[1].mlp.up_proj.weight)


def test_ranks_that_made_other_weights_train_those_of_rank_0() -> None:
    """Halves of two models would be none."""
    for weight in run_ranks(2, started_apart, parity.config()):
        assert torch.equal(tiny.model(seed=0).model.layers[1].mlp.up_proj.weight, weight)


def test_units_of_a_model() -> None:
    """Layers with their experts inside, embeddings where the head has its own weight, and the rest with the root."""
    for tied in (True, False):
        model = tiny.model("qwen3_moe", tie_word_embeddings=tied)
        units = find_units(model)

        assert [layer.name for layer in units.layers] == ["model.layers.0", "model.layers.1"]
        assert [[name for name, _ in layer.experts] for layer in units.layers] == [
            ["model.layers.0.mlp.experts"],
            ["model.layers.1.mlp.experts"],
        ]
        assert (units.embeddings is None) == tied
        assert list(units.modules())[-1] is model


def test_units_inside_a_peft_model() -> None:
    """The root is what is called; names have its prefix."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(target_modules=["q_proj"]))

    units = find_units(model)

    assert units.root is model
    assert units.layers[0].name == "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("shape", "size", "ep", "dim"),
    [
        ((8, 64, 32), 4, 1, 0),
        ((4, 64, 32), 8, 1, 1),
        ((4, 6, 32), 8, 1, 2),
        ((4, 6, 9), 8, 1, 0),
        ((8, 64, 32), 4, 2, 1),
        ((8, 6, 32), 4, 2, 2),
    ],
)
def test_which_dimension_of_experts_is_sharded(shape: tuple[int, ...], size: int, ep: int, dim: int) -> None:
    """Whole experts where there are enough, rows or columns of each where there are not."""
    assert expert_shard_dim(shape, size, ep) == dim


def prepared_twice(rank: int, first: Any, second: Any, other: Any) -> tuple[bool, list[str]]:
    """Prepare a model twice by the same settings, and ask about others; return whether a step is right, and the keys."""
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    window = parity.batches(2)
    model = tiny.model("qwen3_moe", num_experts=4)
    expected = parity.reference(model, window)
    parity.prepared(model, first, 2, rank)
    engine = parity.prepared(model, second, 2, rank)
    parity.assert_equal(parity.step(engine, model, [window[rank]]), expected)
    problems = Engine(other, Context(world_size=2, rank=rank)).problems(model)
    return True, [problem.key for problem in problems]


def test_a_sharded_model_stays_as_it_was_sharded() -> None:
    """A second engine may train it on; one that wants another layout is told to begin with a new model."""
    plan = {"sp_size": 1, "ep_size": 2}
    other = parity.config(backend_config={"reshard_after_forward": False})

    for right, keys in run_ranks(2, prepared_twice, *[parity.config(parallel_plan=plan)] * 2, other):
        assert right
        assert ["parallel_plan.ep_size", "backend_config.reshard_after_forward"] == keys


# ---- a second engine ----


def unfrozen_later(rank: int, settings: Any) -> list[str]:
    """Shard a bf16 model with a frozen layer, then train that layer, too; return what is said."""
    from torchturbo.errors import ConfigError

    model = tiny.model().bfloat16()
    model.model.layers[0].requires_grad_(False)
    engine = parity.prepared(model, settings, 2, rank)
    assert set(engine.context.saved_dtypes.values()) == {torch.bfloat16}
    again = parity.prepared(model, settings, 2, rank)
    assert engine.context.saved_dtypes == again.context.saved_dtypes  # although trained parameters are fp32 by now
    said = []
    for layer, trains in ((0, True), (1, False)):
        model.model.layers[layer].requires_grad_(trains)
        try:
            parity.prepared(model, settings, 2, rank)
        except ConfigError as error:
            said += [problem.message for problem in error.problems]
        model.model.layers[layer].requires_grad_(not trains)
    return said


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_sharded_model_trains_what_it_was_sharded_for(precision: str) -> None:
    """FSDP2 would give a parameter that is unfrozen later no gradient; exports go back to the format a model came in."""
    for said in run_ranks(2, unfrozen_later, parity.config(mixed_precision=precision)):
        thawed, frozen = said
        assert thawed.startswith("9 parameters were frozen when the model was sharded: model.layers.0.")
        assert frozen.startswith("9 parameters were trained when the model was sharded: model.layers.1.")


def groups(rank: int, settings: Any) -> int:
    import torch.distributed as dist

    parity.prepared(tiny.model(), settings, 2, rank)
    before = dist.distributed_c10d._world.group_count
    parity.prepared(tiny.model(), settings, 2, rank)
    return int(dist.distributed_c10d._world.group_count - before)


def test_a_second_engine_takes_the_groups_of_the_first() -> None:
    """Process groups are never given back."""
    assert run_ranks(2, groups, parity.config(parallel_plan={"sp_size": 2})) == [0, 0]


def replicated(rank: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    parameter.grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Replicate()])
    return float(clip_grad_norm([parameter]))


def test_what_every_rank_holds_counts_once() -> None:
    """A gradient that is not sharded."""
    assert run_ranks(2, replicated) == [6.0, 6.0]


def left_without_heads(rank: int, other: Any) -> list[str]:
    """Shard a model with extra heads, and ask about a configuration without them; return what is said."""
    import mtp_models

    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    model = mtp_models.model("glm4_moe")
    parity.prepared(model, parity.config(mtp={"enabled": True}), 2, rank)
    problems = Engine(other, Context(world_size=2, rank=rank)).problems(model)
    return [f"{problem.key}: {problem.message}" for problem in problems]


def test_a_model_that_was_sharded_with_heads_keeps_them() -> None:
    """Their parameters are shards of its units."""
    message = "mtp.enabled: this Glm4MoeForCausalLM was sharded with True, and now is to be with False"
    assert [[message]] * 2 == run_ranks(2, left_without_heads, parity.config())
