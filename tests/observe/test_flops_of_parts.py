"""Flops where a part of a model is trained: adapters as PEFT makes them, single weights; against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from counts import MLA, B, T, close, counted, step
from peft import LoraConfig, PeftModel, get_peft_model

from torchturbo.observe.matmuls import Uncountable, count

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", MLA | {"first_k_dense_replace": 2}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
                      "embd_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox", {}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {}),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}),
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    kind, settings = MODELS[name]
    model = tiny.model(kind, **(settings | changes))
    if kind != "gemma2":
        model.set_attn_implementation("sdpa")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.config.use_cache = False
    return model.train()


def with_lora(targets: list[str], layers: int = 2, rank: int = 4, **settings: Any) -> Any:
    model = build("llama", num_hidden_layers=layers, attention_bias=True)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=targets, **settings)).train()


def assert_counted(model: Any) -> None:
    """Hold the hardware's flops, which without checkpointing are the model's, against torch's, to a percent."""
    assert close(counted(lambda: step(model))) == count(model).hardware(B * T, B * T * T)


@pytest.mark.parametrize("layers", [1, 2, 8])
@pytest.mark.parametrize(
    "targets",
    [["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "v_proj"], ["o_proj"], ["up_proj"], ["down_proj"], EVERY],
    ids="+".join,
)
def test_adapters(targets: list[str], layers: int) -> None:
    """Queries, keys and values stand side by side, so do a layer and its adapter."""
    assert_counted(with_lora(targets, layers))


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_an_adapters_own_products_follow_one_another(bias: str) -> None:
    """Large enough to be seen; a bias that is trained besides stands behind neither."""
    assert_counted(with_lora(["q_proj"], layers=1, rank=64, bias=bias))


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_with_checkpointing(reentrant: bool) -> None:
    """With dropout inside the adapters too, which is not behind a layer's last product."""
    model = with_lora(EVERY, lora_dropout=0.1)
    model.enable_input_require_grads()
    tiny.checkpoint(model.base_model.model, reentrant)

    assert_counted(model)


def test_a_head_that_is_trained_in_a_copy_counts_once() -> None:
    """PEFT keeps the original beside it (``modules_to_save``)."""
    model = with_lora(["q_proj"], modules_to_save=["lm_head"])

    assert [part.name for part in count(model).parts].count("head") == 1
    assert count(model).parts[-1].weights == 32 * 320
    assert_counted(model)


def test_copies_of_blocks_and_embeddings_count_once() -> None:
    """Whatever PEFT is told to copy."""
    model = with_lora(["q_proj"], modules_to_save=["mlp", "embed_tokens"])

    assert_counted(model)


def two_adapters() -> PeftModel:
    model: PeftModel = with_lora(["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"]))
    return model


def test_an_adapter_that_is_not_active_counts_nothing() -> None:
    """Each of two, in turn; and none, where PEFT is told to leave them out."""
    model = two_adapters()
    for name in ("default", "other"):
        model.set_adapter(name)
        assert_counted(model)
    bare = count(build("llama")).parts
    with model.disable_adapter():
        assert [part.forward for part in bare] == [part.forward for part in count(model).parts]


ONLY = [
    ("llama", "layers.1.input_layernorm"), ("llama", "layers.1.post_attention_layernorm"),
    ("llama", "layers.1.self_attn.k_proj"), ("llama", "layers.1.mlp.gate_proj"), ("llama", "layers.1.mlp.down_proj"),
    ("llama", "model.norm"),
    ("qwen3", "layers.1.self_attn.q_norm"), ("qwen3", "layers.1.self_attn.k_norm"),
    ("qwen3_moe", "layers.1.mlp.gate.weight"), ("qwen3_moe", "layers.1.mlp.experts.gate_up_proj"),
    ("qwen3_moe", "layers.1.mlp.experts.down_proj"),
    ("deepseek_v3", "layers.1.self_attn.q_a_proj"), ("deepseek_v3", "layers.1.self_attn.q_b_proj"),
    ("deepseek_v3", "layers.1.self_attn.kv_a_layernorm"), ("deepseek_v3", "layers.1.self_attn.kv_b_proj"),
    ("gemma2", "layers.1.pre_feedforward_layernorm"), ("gemma2", "layers.1.post_feedforward_layernorm"),
    ("gpt2", "h.1.ln_1"), ("gpt2", "h.1.attn.c_attn"), ("gpt2", "h.1.ln_2"), ("gpt2", "h.1.mlp.c_fc.bias"),
    ("gpt_neox", "layers.1.attention.dense"), ("gpt_neox", "layers.1.post_attention_layernorm"),
    ("gpt_neox", "layers.1.mlp.dense_h_to_4h"),
    ("cohere", "layers.1.input_layernorm"), ("cohere", "layers.1.self_attn.o_proj"),
    ("cohere", "layers.1.mlp.up_proj"),
    ("glm4", "layers.1.post_self_attn_layernorm"), ("glm4", "layers.1.mlp.gate_up_proj"),
    ("opt", "layers.1.self_attn_layer_norm"), ("opt", "layers.1.final_layer_norm"), ("opt", "layers.1.fc1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part"), ONLY)
def test_a_single_trained_part(name: str, part: str) -> None:
    """Gradients flow back to where it stands in its layer, and no further."""
    model = build(name)
    model.requires_grad_(False)
    trained = [weight.requires_grad_(True) for path, weight in model.named_parameters() if part in path]

    assert trained
    assert_counted(model)


@pytest.mark.parametrize("place", ["resid_pdrop", "attn_pdrop"])
def test_dropout_behind_a_layers_last_product(place: str) -> None:
    """Has that computed again by checkpointing that stops early; dropout elsewhere has not."""
    model = build("gpt2", **{place: 0.1})
    tiny.checkpoint(model, reentrant=False)

    assert_counted(model)


def test_a_ranks_share_of_the_experts_counts_as_what_a_token_meets() -> None:
    """With experts spread over ranks each still computes for as many tokens: in one tensor, and one module each."""
    model, half = build("qwen3_moe"), build("qwen3_moe")
    for layer in half.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            setattr(layer.mlp.experts, name, torch.nn.Parameter(getattr(layer.mlp.experts, name)[:2].detach()))
    assert count(model) == count(half)

    for built, number in ((model, 4), (half, 2)):
        for layer in built.model.layers:
            layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 48) for _ in range(number))
    assert count(model) == count(half)


def test_a_tensor_of_three_dimensions_that_holds_no_experts() -> None:
    """Is not explained, whatever divides their number."""
    model = build("qwen3_moe")
    model.model.layers[0].mlp.mixing = torch.nn.Parameter(torch.ones(2, 4, 4))

    with pytest.raises(Uncountable, match="mixing of Qwen3MoeSparseMoeBlock is no weight"):
        count(model)


def test_adapters_of_all_experts_at_once_are_not_known() -> None:
    """PEFT multiplies them out for every expert, whatever a token meets."""
    config = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])

    with pytest.raises(Uncountable, match="adapts all experts at once"):
        count(get_peft_model(build("qwen3_moe"), config))
