"""What expert parallelism refuses before a weight is loaded, and what it takes on trial."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import mixtures
import parity
import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.steps import experts
from torchturbo.errors import Problem
from torchturbo.parallel.experts import find_experts, number_of_experts, refusal

KEY = "parallel_plan.ep_size"


def problems(model: Any, ep_size: int, world_size: int) -> list[Problem]:
    engine = Engine(parity.config(parallel_plan={"ep_size": ep_size}), Context(world_size=world_size))
    found = [problem for problem in engine.problems(model) if problem.key == KEY]
    assert all("parity.json:" in problem.place for problem in found)
    return found


def said(model: Any, ep_size: int = 2, world_size: int = 2) -> str:
    """Return the one problem of a model, with its remedy."""
    (problem,) = problems(model, ep_size, world_size)
    return f"{problem.message}; {problem.remedy}"


def unloaded(kind: str, **changes: Any) -> Any:
    """Return a model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(mixtures.MODELS.get(kind, {}) | changes)))


def test_every_family_is_taken_without_weights() -> None:
    """A model of full size on the meta device is enough."""
    for kind in ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "gpt_oss"):
        assert [] == problems(unloaded(kind, num_hidden_layers=2), 4, 8)


def test_experts_that_do_not_divide() -> None:
    """All factors, and the sizes next to the one given that divide experts and ranks."""
    assert said(unloaded("qwen3_moe", num_hidden_layers=2), 3, 6) == (
        "3 ranks share the 8 experts of Qwen3MoeExperts: 8 / 3 = 2.66667 is no whole number; use 2"
    )
    assert said(unloaded("qwen3_moe", num_hidden_layers=1), 16, 16).endswith("8 / 16 = 0.5 is no whole number; use 8")


def test_sizes_that_ep_fsdp_does_not_divide() -> None:
    """Each parameter of the experts that can't be sharded, with what would do."""
    model = mixtures.build("gpt_oss", intermediate_size=9, hidden_size=28, head_dim=8)
    found = problems(model, 2, 16)

    assert [
        "ep_fsdp_size = world_size / ep_size = 16 / 2 = 8 ranks shard each expert of GptOssExperts, but divide none of"
        f" the sizes of {name} {sizes}"
        for name, sizes in (
            ("gate_up_proj", [28, 18]),
            ("gate_up_proj_bias", [18]),
            ("down_proj", [9, 28]),
            ("down_proj_bias", [28]),
        )
    ] == [problem.message for problem in found]
    assert {"use 1 or 8"} == {problem.remedy for problem in found}


def test_a_dense_model_has_none() -> None:
    """The mesh would be made of groups that do nothing."""
    assert said(tiny.model()) == "LlamaForCausalLM has no experts to divide; set it to 1"


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 48}, "Llama4TextExperts"),
        ("dbrx", {"d_model": 32, "n_heads": 4, "n_layers": 1, "attn_config": {"rope_theta": 1e4}}, "DbrxExperts"),
    ],
)
def test_experts_of_another_make(kind: str, changes: dict[str, Any], named: str) -> None:
    """They are named: every expert meets every token there, or each stands alone."""
    assert said(unloaded(kind, **({"num_hidden_layers": 1} | changes))).endswith(
        "has experts that are not stacked and called with (hidden_states, top_k_index, top_k_weights):"
        f" {named}; set it to 1"
    )


def test_experts_that_share_a_parameter() -> None:
    """Its gradient would have to be summed over the ranks of a group, and nobody does."""
    model = mixtures.build()
    for layer in model.model.layers:
        layer.mlp.experts.norm = nn.LayerNorm(32)

    assert said(model) == "Qwen3MoeExperts holds norm.weight, which all of its experts share; set it to 1"


def test_adapters_on_experts() -> None:
    """LoRA's matrices belong to all experts at once; adapters elsewhere leave the experts as they are."""
    peft = pytest.importorskip("peft")
    whole = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    beside = peft.LoraConfig(r=2, target_modules=["q_proj"])

    found = problems(peft.get_peft_model(mixtures.build(), whole), 2, 2)
    assert 2 == len(found)
    assert all("experts.base_layer is wrapped in an adapter" in problem.message for problem in found)
    assert [] == problems(peft.get_peft_model(mixtures.build(), beside), 2, 2)


def test_experts_outside_of_layers() -> None:
    """FSDP2 would shard them with the rest of the model, over other ranks."""
    model = mixtures.build()
    model.model.extra = mixtures.build(seed=1).model.layers[0].mlp.experts

    assert said(model) == (
        "model.extra is in no layer that every batch passes and that is sharded by itself; set it to 1"
    )


# ---- classes that the table does not know ----


class Unknown(nn.Module):
    """Experts of no family, as a model with code of its own may have them."""

    def __init__(self, config: Any, gain: Callable[[Any], float | Tensor] = lambda self: 1.0) -> None:
        super().__init__()
        self.config, self.gain = config, gain
        self.num_experts, self.hidden_dim, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.first = nn.Parameter(torch.randn(self.num_experts, inner, self.hidden_dim) / 5)
        self.second = nn.Parameter(torch.randn(self.num_experts, self.hidden_dim, inner) / 5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute expert by expert."""
        result = torch.zeros_like(tokens).view(-1, self.hidden_dim)
        for expert in range(self.num_experts):
            token, at = torch.where(chosen == expert)
            inner = torch.relu(tokens[token] @ self.first[expert].T)
            value = (inner @ self.second[expert].T) * self.gain(self) * weights[token, at, None]
            result = result.index_add(0, token, value)
        return result


def unknown(**arguments: Any) -> Any:
    model = mixtures.build()
    for layer in model.model.layers:
        torch.manual_seed(2)
        layer.mlp.experts = Unknown(model.config, **arguments)
    return model


def test_an_unknown_class_that_computes_by_experts_is_taken() -> None:
    """A probe has shown it: half of the experts compute their share."""
    assert [] == problems(unknown(), 2, 2)
    assert [] == problems(unknown().to("meta"), 2, 2)


def test_an_unknown_class_that_does_not_is_refused() -> None:
    """Here each expert's result depends on how many there are."""
    assert said(unknown(gain=lambda module: 1 / module.num_experts)) == (
        "Unknown is of no known family, and computes something else with half of its experts; set it to 1"
    )


def test_an_unknown_class_that_can_not_be_tried_is_refused() -> None:
    """With what went wrong."""
    assert said(unknown(gain=lambda module: module.absent)).startswith(
        "Unknown is of no known family, and can't be probed (AttributeError: 'Unknown' object has no attribute 'absent'"
    )


@pytest.mark.parametrize(
    ("module", "experts", "config"),
    [
        ("qwen3_vl_moe", "Qwen3VLMoeTextExperts", "Qwen3VLMoeTextConfig"),
        ("glm4v_moe", "Glm4vMoeTextExperts", "Glm4vMoeTextConfig"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeExperts", "Ernie4_5_VLMoeTextConfig"),
    ],
)
def test_vision_language_models_of_known_families_pass_the_probe(module: str, experts: str, config: str) -> None:
    """Their experts are classes of their own, in full size and without weights."""
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    settings = getattr(code, config)()
    settings._experts_implementation = "grouped_mm"
    arguments = (settings,) if module != "ernie4_5_vl_moe" else (settings, settings.moe_intermediate_size[0])
    with torch.device("meta"):
        assert refusal("mlp.experts", getattr(code, experts)(*arguments)) is None


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_probe_agrees_with_the_table(kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that are known would pass it, in every implementation."""
    monkeypatch.setattr("torchturbo.parallel.experts.FAMILIES", ())
    model = mixtures.build(kind)
    model.set_experts_implementation(implementation)

    assert all(refusal(name, module) is None for name, module in find_experts(model).items())


def patched() -> Any:
    """Return a model whose experts of no family have a forward of their own on top."""
    model = unknown()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        vars(experts)["forward"] = MethodType(lambda self, *args: 3 * Unknown.forward(self, *args), experts)
    return model


def test_the_probe_tries_the_forward_that_is_called() -> None:
    """One that was put into an instance is bound to the copy."""
    assert [] == problems(patched(), 2, 2)


def hold_unknown(rank: int) -> None:
    settings = parity.config(parallel_plan={"ep_size": 2})
    parity.check(rank, 2, unknown, settings, parity.batches(2))
    model = patched()
    expected = parity.reference(model, parity.batches(2))
    parity.prepared(model, settings, 2, rank)
    engine = parity.prepared(model, settings, 2, rank)  # a second engine finds the experts divided
    parity.assert_equal(parity.step(engine, model, parity.share(parity.batches(2), 2, 1, rank)), expected)


def test_a_class_that_passed_the_probe_computes_the_same() -> None:
    """On two ranks, against one process; a model that was prepared twice, too."""
    run_ranks(2, hold_unknown)


# ---- what is a mixture of experts, and what the step leaves behind ----


def test_what_is_found() -> None:
    """Stacked matrices alone are none: a convolution's weight has three dimensions, too."""
    model = mixtures.build()
    model.model.convolution = nn.Conv1d(4, 4, 3)

    assert ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"] == list(find_experts(model))
    assert mixtures.E == number_of_experts(model)
    assert 0 == number_of_experts(tiny.model())
    assert 3 == number_of_experts(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)] * 3)}))


def take_apart_and_unite(rank: int) -> None:
    """Divide the experts of a model without FSDP2, and undo it."""
    from torchturbo.parallel.mesh import Meshes

    model = mixtures.build("gpt_oss")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    module = model.model.layers[0].mlp.experts
    module.down_proj.requires_grad_(False)
    module.down_proj.mark = "kept"
    engine = Engine(parity.config(parallel_plan={"ep_size": 2}), Context(world_size=2, rank=rank))
    engine.context.meshes = Meshes.build(engine.context.plan, "cpu")
    experts.apply(model, engine.config, engine.context)

    names = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert [name for name, value in module.named_parameters() if isinstance(value, DTensor)] == names
    local = module.down_proj.to_local()
    assert torch.equal(before["model.layers.0.mlp.experts.down_proj"][4 * rank : 4 * rank + 4], local)
    assert local.untyped_storage().nbytes() == local.numel() * 4  # no view of all experts
    assert not module.down_proj.requires_grad
    assert module.down_proj.mark == "kept"
    assert module.num_experts == mixtures.E

    module.act_fn = None
    try:
        with torch.no_grad():
            module.forward(torch.zeros(2, 7), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    except RuntimeError:  # of the wrong width
        pass
    assert isinstance(module.down_proj, DTensor)
    assert module.num_experts == mixtures.E

    experts.undo(model)
    assert "forward" not in vars(module)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert not module.down_proj.requires_grad


def test_the_step_can_be_undone_and_leaves_nothing_after_an_error() -> None:
    """Parameters, what was noted on them, and the number of experts."""
    run_ranks(2, take_apart_and_unite)


def from_meta(rank: int) -> None:
    from torchturbo.parallel.mesh import Meshes

    model = unloaded("qwen3_moe", num_hidden_layers=1)
    engine = Engine(parity.config(parallel_plan={"ep_size": 2}), Context(world_size=2, rank=rank))
    engine.context.meshes = Meshes.build(engine.context.plan, "cpu")
    experts.apply(model, engine.config, engine.context)
    part = model.model.layers[0].mlp.experts.down_proj
    assert part.is_meta
    assert part.to_local().shape[0] * 2 == part.shape[0] == mixtures.E
    experts.undo(model)
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == mixtures.E


def test_a_model_without_weights_is_divided_too() -> None:
    """Each rank then reads its own experts' weights alone."""
    run_ranks(2, from_meta)
