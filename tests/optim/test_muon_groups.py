"""Which parameter goes to Muon, and how fused ones are taken apart, family by family; no weight is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from torchturbo.models import register
from torchturbo.optim.fused import Fused
from torchturbo.optim.groups import layouts, matrices, parameter_groups, summary
from torchturbo.optim.muon import orthogonalised

register()
SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = 5
"""How many experts there are: no other dimension of the models below."""
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

GATE_UP = Fused(-2, 1, (24, 24))
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Fused]]] = {
    "qwen3_moe": ({"num_experts": EXPERTS}, {"mlp.experts.gate_up_proj": GATE_UP}),
    "qwen2_moe": (
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
        {"mlp.experts.gate_up_proj": GATE_UP},
    ),
    "mixtral": ({"num_local_experts": EXPERTS}, {"mlp.experts.gate_up_proj": Fused(-2, 1, (48, 48))}),
    "olmoe": ({"num_experts": EXPERTS}, {"mlp.experts.gate_up_proj": Fused(-2, 1, (48, 48))}),
    "phimoe": ({"num_local_experts": EXPERTS}, {"mlp.experts.gate_up_proj": Fused(-2, 1, (48, 48))}),
    "deepseek_v3": (
        {"n_routed_experts": EXPERTS, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, **MLA},
        {"mlp.experts.gate_up_proj": GATE_UP},
    ),
    "glm4_moe": (
        {"n_routed_experts": EXPERTS, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        {"mlp.experts.gate_up_proj": GATE_UP},
    ),
    "llada2_moe": (
        {"num_experts": EXPERTS, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        {"mlp.experts.gate_up_proj": GATE_UP, "attention.query_key_value.weight": Fused(-2, 1, (32, 16, 16))},
    ),
    "gpt_oss": ({"num_local_experts": EXPERTS}, {"mlp.experts.gate_up_proj": Fused(-1, 48, (1, 1))}),
    "llama4_text": (
        {"num_local_experts": EXPERTS, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 40},
        {"feed_forward.experts.gate_up_proj": Fused(-1, 1, (48, 48))},
    ),
    "granitemoeshared": (
        {"num_local_experts": EXPERTS, "shared_intermediate_size": 40},
        {
            "block_sparse_moe.experts.gate_up_proj": Fused(-2, 1, (48, 48)),
            "shared_mlp.input_linear.weight": Fused(-2, 1, (40, 40)),
        },
    ),
    "jetmoe": (
        {"num_local_experts": EXPERTS, "kv_channels": 8},
        {"mlp.input_linear.weight": Fused(-2, 1, (48, 48))},
    ),
    "llama": ({}, {}),
    "phi3": (
        {},
        {"mlp.gate_up_proj.weight": Fused(-2, 1, (48, 48)), "self_attn.qkv_proj.weight": Fused(-2, 1, (32, 16, 16))},
    ),
    "glm4": ({}, {"mlp.gate_up_proj.weight": Fused(-2, 1, (48, 48))}),
    "gpt2": ({}, {"attn.c_attn.weight": Fused(-1, 1, (32, 32, 32))}),
    "gpt_neox": ({}, {"attention.query_key_value.weight": Fused(-2, 4, (8, 8, 8))}),
    "bloom": ({}, {"self_attention.query_key_value.weight": Fused(-2, 4, (8, 8, 8))}),
    "dbrx": (
        {
            "d_model": 32, "n_heads": 4, "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"moe_num_experts": EXPERTS, "ffn_hidden_size": 24},
        },
        {"attn.Wqkv.weight": Fused(-2, 1, (32, 16, 16))},
    ),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, {"attn.Wqkv.weight": Fused(-2, 1, (32, 32, 32))}),
    "qwen3_5_text": (
        {
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
        },
        {"linear_attn.in_proj_qkv.weight": Fused(-2, 1, (16, 16, 24))},
    ),
}  # fmt: skip
"""Model types: (settings, how the matrices of a layer are fused)."""


def family(kind: str) -> nn.Module:
    """Return a model of a family on the meta device."""
    config = AutoConfig.for_model(kind, **(SMALL | FAMILIES[kind][0]))
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_hidden_matrices_go_to_muon_and_nothing_else(kind: str) -> None:
    """Every weight of a linear layer in the decoder but its routers, and every stack of experts."""
    model = family(kind)
    muon = {matrix.name: matrix for matrix in matrices(model)}

    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        vocabulary = 101 in parameter.shape or "wpe" in name
        router = EXPERTS in parameter.shape[-2:] or "shared_expert_gate" in name
        linear = parameter.ndim == 2 and type(owner).__name__.endswith(("Linear", "Conv1D"))
        experts = parameter.ndim == 3 and parameter.shape[0] == EXPERTS
        assert ((linear or experts) and not vocabulary and not router) == (name in muon), name
    assert len(muon) == len({id(matrix.parameter) for matrix in muon.values()}) > 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_fused_matrices_are_known(kind: str) -> None:
    """In every layer that has one."""
    expected = FAMILIES[kind][1]

    found = {matrix.name: matrix.fused for matrix in matrices(family(kind)) if matrix.fused}

    assert set(expected) == {next(end for end in expected if name.endswith(end)) for name in found}
    assert all(
        layout == next(expected[end] for end in expected if name.endswith(end)) for name, layout in found.items()
    )
    assert len(found) == sum(name.endswith(tuple(expected)) for name, _ in family(kind).named_parameters())


def named(kind: str, **marks: Any) -> Any:
    return type(kind, (nn.Module,), marks)


def older(kind: str, shape: tuple[int, ...], attribute: str = "gate_up_proj") -> nn.Module:
    """Return a layer with experts of a class of this name and with the marks of transformers 5.6."""
    experts = named(kind, **({"is_transposed": True} if kind == "GptOssExperts" else {}))()
    experts.register_parameter(attribute, nn.Parameter(torch.zeros(shape)))
    owner = named("GraniteMoeMoE")()
    owner.input_linear = experts
    return nn.ModuleList([owner])


@pytest.mark.parametrize(
    ("kind", "shape", "attribute", "layout"),
    [
        ("DeepseekV3NaiveMoe", (3, 8, 6), "gate_up_proj", Fused(-2, 1, (4, 4))),
        ("GptOssExperts", (3, 6, 8), "gate_up_proj", Fused(-1, 4, (1, 1))),
        ("GraniteMoeParallelExperts", (3, 8, 6), "weight", Fused(-2, 1, (4, 4))),
    ],
)
def test_experts_of_older_transformers(kind: str, shape: tuple[int, ...], attribute: str, layout: Fused) -> None:
    """Their classes have other names, or do not say how they store gate and up."""
    (matrix,) = matrices(older(kind, shape, attribute))

    assert layout == matrix.fused


def test_a_router_that_is_a_plain_linear_layer() -> None:
    """It stands beside the experts; a gate elsewhere is a matrix like any other."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(6, 3), nn.Linear(6, 8)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.attention = nn.ModuleDict({"gate": nn.Linear(6, 6)})

    names = [matrix.name for matrix in matrices(nn.ModuleList([Sparse()]))]

    assert ["0.up.weight", *(f"0.experts.{at}.weight" for at in range(3)), "0.attention.gate.weight"] == names


def test_a_vision_towers_layers_count_too() -> None:
    """Its query, key and value lie in one; what leads out of it is no layer."""
    from transformers import AutoModelForImageTextToText

    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32, "patch_size": 4}
    config = AutoConfig.for_model("qwen2_vl", text_config=SMALL | {"hidden_size": 32}, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)

    tower = {matrix.name: matrix.fused for matrix in matrices(model) if "visual" in matrix.name}

    block = "model.visual.blocks.0."
    assert {
        f"{block}attn.qkv.weight": Fused(-2, 1, (16, 16, 16)),
        f"{block}attn.proj.weight": None,
        f"{block}mlp.fc1.weight": None,
        f"{block}mlp.fc2.weight": None,
    } == tower


def test_a_known_layout_is_what_the_family_computes() -> None:
    """The parts of a fused weight, applied apart, give the parts of its output."""
    model = tiny.model("phi3")
    attention = model.model.layers[0].self_attn
    weight = attention.qkv_proj.weight
    seen: dict[str, Tensor] = {}
    layout = layouts(model)[weight]
    hidden = torch.randn(1, 3, 32)
    attention.qkv_proj.register_forward_hook(lambda module, args, output: seen.update(out=output))
    attention.qkv_proj(hidden)
    query, key, value = (hidden @ layout.joined(part).T for part in layout.split(weight))

    torch.testing.assert_close(seen["out"], torch.cat([query, key, value], -1))
    assert [(1, 3, 32), (1, 3, 16), (1, 3, 16)] == [tuple(part.shape) for part in (query, key, value)]


LAYOUT_CASES = [
    (Fused(-2, 1, (6, 6)), lambda w: [w[:6], w[6:]]),
    (Fused(-2, 1, (8, 2, 2)), lambda w: [w[:8], w[8:10], w[10:]]),
    (Fused(-2, 2, (2, 2, 2)), lambda w: [w[[0, 1, 6, 7]], w[[2, 3, 8, 9]], w[[4, 5, 10, 11]]]),
    (Fused(-1, 1, (5, 5)), lambda w: [w[:, :5], w[:, 5:]]),
    (Fused(-1, 5, (1, 1)), lambda w: [w[:, 0::2], w[:, 1::2]]),
]


@pytest.mark.parametrize(("layout", "by_hand"), LAYOUT_CASES, ids=[str(layout) for layout, _ in LAYOUT_CASES])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "experts"])
def test_fused_maps_are_orthogonalised_apart(layout: Fused, by_hand: Any, batch: tuple[int, ...]) -> None:
    """Each with the scale of its own shape, and back in its place."""
    weight = torch.randn(*batch, 12, 10, generator=torch.Generator().manual_seed(2))

    update = orthogonalised(weight, layout)

    for one, moved in zip(weight.reshape(-1, 12, 10), update.reshape(-1, 12, 10), strict=True):
        for part, found in zip(by_hand(one), by_hand(moved), strict=True):
            torch.testing.assert_close(found, orthogonalised(part), rtol=1e-4, atol=1e-5)
    assert float((update - orthogonalised(weight)).abs().max()) > 0.01


def test_groups_by_kind_decay_and_nothing_frozen() -> None:
    """Muon's first; what does not decay is apart."""
    model = tiny.model("qwen3_moe", attention_bias=True)
    model.model.layers[0].requires_grad_(False)
    decaying = [name for name, _ in model.named_parameters() if "bias" not in name and "norm" not in name]

    groups = parameter_groups(model, 0.1, decaying)

    assert [(True, 0.1), (False, 0.1), (False, 0.0)] == [(group["use_muon"], group["weight_decay"]) for group in groups]
    layer = model.model.layers[1]
    muon = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
    assert {id(module.weight) for module in muon} | {id(p) for p in layer.mlp.experts.parameters()} == {
        id(parameter) for parameter in groups[0]["params"]
    }
    assert {id(model.model.embed_tokens.weight), id(model.lm_head.weight), id(layer.mlp.gate.weight)} == {
        id(parameter) for parameter in groups[1]["params"]
    }
    assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())


def test_groups_without_decay_are_not_split() -> None:
    """An empty group would have no place in a checkpoint that names parameters."""
    groups = parameter_groups(tiny.model("qwen3"), 0.0, [])

    assert [True, False] == [group["use_muon"] for group in groups]


def test_the_summary_counts_linear_maps() -> None:
    """Two layers of four matrices in the attention, four experts of three."""
    model = tiny.model("qwen3_moe")
    muon = sum(matrix.parameter.numel() for matrix in matrices(model))
    rest = sum(parameter.numel() for parameter in model.parameters()) - muon

    assert (
        f"Muon for {muon:,} parameters in 32 matrices, 2 fused ones split; AdamW for {rest:,} in 13 tensors"
        == summary(model)
    )


def test_adapters_are_matrices_and_stacked_ones_are_not() -> None:
    """LoRA's A and B are linear maps; those of a stack of experts lie beside each other in one tensor."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    model = get_peft_model(tiny.model("qwen3_moe"), config)

    trained = [matrix.name for matrix in matrices(model) if matrix.parameter.requires_grad]

    assert 4 == len(trained)  # two layers, A and B
    assert all("q_proj.lora_" in name for name in trained)


def test_a_vector_adapter_stays_with_adamw() -> None:
    """Of rank 1 there is only a direction, which would get the same length at every step."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model("llama"), LoraConfig(r=1, target_modules=["q_proj"]))

    assert [] == [matrix.name for matrix in matrices(model) if matrix.parameter.requires_grad]


def test_a_model_of_ones_own_has_layers_too() -> None:
    """Where nothing says what a layer is, the entries of lists are."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
            self.head = nn.Linear(4, 8)

    assert ["inner.0.0.weight", "inner.1.0.weight"] == [matrix.name for matrix in matrices(Own())]


def test_a_tied_head_is_no_hidden_matrix() -> None:
    """Not even where a layer has it once more, as the heads of multi-token prediction do."""
    model = tiny.model("llama", tie_word_embeddings=True)
    model.model.layers[1].head = nn.Linear(32, 320, bias=False)
    model.model.layers[1].head.weight = model.lm_head.weight

    assert not [matrix.name for matrix in matrices(model) if 320 in matrix.parameter.shape]
