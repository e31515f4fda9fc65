"""Flops: against torch's own counter on real models, and against the formulas by hand."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from counts import MLA, B, T, batch, causal_pairs, close, counted, forward, step

from torchturbo.observe.flops import FULL, Span
from torchturbo.observe.matmuls import Uncountable, count

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                "shared_expert_intermediate_size": 40}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v3, q not compressed": ("deepseek_v3", MLA | {"q_lora_rank": None}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "cohere2": ("cohere2", {}),
    "glm4_moe": ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                              "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    # Transformers runs every expert of Llama 4 on every token, so that is what can be compared
    "llama4": ("llama4_text", {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size_mlp": 48}),
    "gemma4": ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
                               "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "opt, with projections": ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 48, "dropout": 0.0}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> Any:
    kind, changes = MODELS[name]
    model = tiny.model(kind, **changes)
    if kind not in ("gpt_oss", "gemma2"):  # sinks and capped scores have no sdpa form
        model.set_attn_implementation("sdpa")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter knows no grouped product
    model.config.use_cache = False
    return model.train()


@every_model
def test_forward_is_what_torch_counts(name: str) -> None:
    """On the math backend, to a percent."""
    model = build(name)

    assert close(counted(lambda: model(**batch()))) == forward(count(model), B * T, B * T * T)


@every_model
def test_training_is_what_torch_counts(name: str) -> None:
    """Forward and backward, with nothing recomputed: model and hardware flops are the same."""
    model = build(name)
    flops = count(model)

    expected = counted(lambda: step(model))
    assert close(expected) == flops.model(B * T, B * T * T) == flops.hardware(B * T, B * T * T)
    assert close(3 * forward(flops, B * T, B * T * T)) == flops.model(B * T, B * T * T)


@pytest.mark.parametrize("reentrant", [True, False])
@every_model
def test_hardware_flops_are_what_torch_counts_with_checkpointing(name: str, reentrant: bool) -> None:
    """Non-reentrant checkpointing stops early, and the count knows where."""
    model = build(name)
    without = count(model).model(B * T, B * T * T)
    tiny.checkpoint(model, reentrant)
    flops = count(model)

    assert without == flops.model(B * T, B * T * T)
    assert close(counted(lambda: step(model))) == flops.hardware(B * T, B * T * T)


def test_a_frozen_model_computes_fewer_gradients() -> None:
    """Nothing below the lowest trained layer, and no gradient of a frozen weight."""
    model = build("llama")
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)

    flops = count(model)
    assert close(counted(lambda: step(model))) == flops.model(B * T, B * T * T)
    first, second, head = flops.parts
    assert (first.inputs, first.weights, first.pair_backward) == (0, 0, 0)
    assert second.weights == second.forward
    assert (head.inputs, head.weights) == (head.forward, 0)


def test_gradients_flow_from_the_first_trained_weight_of_a_layer_on() -> None:
    """What stands before it in the layer needs none; the MLP behind it does."""
    model = build("llama")
    model.requires_grad_(False)
    model.model.layers[1].self_attn.o_proj.requires_grad_(True)

    flops = count(model)
    assert close(counted(lambda: step(model))) == flops.model(B * T, B * T * T)
    assert flops.parts[1].inputs == 3 * 32 * 48


def test_a_frozen_head_has_no_gradient_of_its_weight() -> None:
    """Its input has one."""
    model = build("llama")
    model.lm_head.requires_grad_(False)

    assert close(counted(lambda: step(model))) == count(model).model(B * T, B * T * T)


def test_llama_by_hand() -> None:
    """Grouped-query attention, a gated MLP, an untied head: written out."""
    hidden, heads, kv, size, inner, vocab, layers = 32, 4, 2, 8, 48, 320, 2
    weights = layers * (2 * hidden * heads * size + 2 * hidden * kv * size + 3 * hidden * inner) + hidden * vocab
    pairs = layers * heads * 2 * size

    flops = count(build("llama"))
    assert 2 * (weights * 10 + pairs * 58) == forward(flops, 10, 58)
    assert 3 * 2 * (weights * 10 + pairs * 58) == flops.model(10, 58)


def test_active_experts_by_hand() -> None:
    """Two of four experts, and the router over all four."""
    dense = 2 * 32 * 32 + 2 * 32 * 16
    moe = 32 * 4 + 2 * 3 * 32 * 24

    assert 2 * (2 * (dense + moe) + 32 * 320) == forward(count(build("qwen3_moe")), 1, 0)


def test_the_causal_figure_counts_what_the_mask_lets_through() -> None:
    """Full attention in one layer, a window of 8 in the other."""
    flops = count(build("gemma2"))
    window = Span("sliding", 8)

    assert flops.spans == (FULL, window)
    causal = flops.causal(T, {FULL: causal_pairs(T, FULL), window: causal_pairs(T, window)})
    pair = 2 * 3 * 4 * (8 + 8)
    assert flops.model(T, 0) + pair * (T * (T + 1) / 2 + 36 + 16 * 8) == causal
    assert causal < flops.model(T, T * T)


@pytest.mark.parametrize("span", [FULL, Span("sliding", 5), Span("chunked", 5), Span("sliding", 100)])
def test_pairs_by_brute_force(span: Span) -> None:
    """Counting them one by one."""
    for length in range(14):
        seen = 0
        for query in range(length):
            for key in range(query + 1):
                near = query - key < span.size if span.kind == "sliding" else query // 5 == key // 5
                seen += span.kind == "full" or near
        assert seen == causal_pairs(length, span)


def test_a_packed_weight_counts_what_its_layer_computes() -> None:
    """Quantised layers keep two weights in a byte, in a tensor of another shape."""
    model = build("llama")
    expected = forward(count(model), 3, 9)
    for name in ("gate_proj", "down_proj"):
        layer = getattr(model.model.layers[0].mlp, name)
        packed = torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)

    assert expected == forward(count(model), 3, 9)


def test_the_configuration_alone_is_enough() -> None:
    """A model on the meta device, without weights, counts alike."""
    with torch.device("meta"):
        model = tiny.model("deepseek_v3", **MLA)

    assert count(build("deepseek_v3")) == count(model)


def vision_language_model() -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = tiny.model("qwen2").config.to_dict() | {"tie_word_embeddings": False}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision)
    return AutoModelForImageTextToText.from_config(config).train()


def test_a_vision_language_models_language_part_is_counted_and_the_rest_is_named() -> None:
    """The tower's work depends on the images, not on the tokens."""
    flops = count(vision_language_model())
    assert "visual" in flops.left_out
    assert forward(count(build("qwen2")), 5, 25) == forward(flops, 5, 25)
    assert count(build("qwen2")).left_out == ""


def test_a_trained_tower_lets_gradients_through_a_frozen_language_model() -> None:
    """Its features stand among the embeddings: every layer's input needs a gradient, no weight does."""
    model = vision_language_model()
    model.requires_grad_(False)
    flops = count(model)
    assert flops.model(5, 25) == forward(flops, 5, 25)

    model.model.visual.requires_grad_(True)
    flops = count(model)
    assert all(part.inputs == part.forward and part.weights == 0 for part in flops.parts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_frozen_layer_is_not_recomputed_where_nothing_below_it_trains(reentrant: bool) -> None:
    """As the engine checkpoints: Transformers makes every embedding's output require grad."""
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.engine.steps import activation_checkpointing
    from torchturbo.generated.config import ActivationCheckpointingConfig

    model = build("llama")
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    section = ActivationCheckpointingConfig(enabled=True, use_reentrant=reentrant)
    activation_checkpointing.apply(model, EngineConfig(activation_checkpointing=section), Context())

    flops = count(model)
    assert flops.parts[0].recomputed == 0 < flops.parts[1].recomputed
    assert close(counted(lambda: step(model))) == flops.hardware(B * T, B * T * T)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (
            "qwen3_next",
            {"num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
            "conv1d.weight of Conv1d is no weight",
        ),
        ("mamba", {}, "A_log of MambaMixer is no weight of a matrix product that is known"),
        ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}, "an encoder and a decoder"),
    ],
)
def test_what_cannot_be_counted_says_so(kind: str, changes: dict[str, Any], why: str) -> None:
    """Rather than with a wrong figure."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kinds = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2} if kind != "t5" else {"vocab_size": 320}
    factory = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(AutoConfig.for_model(kind, **(kinds | changes)))

    with pytest.raises(Uncountable, match=why):
        count(model)


def test_a_weight_that_nothing_explains_makes_a_model_uncountable() -> None:
    """In a layer, and beside the layers."""
    model = build("llama")
    model.model.layers[0].mixing = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(Uncountable, match="mixing of LlamaDecoderLayer"):
        count(model)

    model = build("llama")
    model.model.positions = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(Uncountable, match="positions of LlamaModel is no weight"):
        count(model)


def test_a_module_that_is_no_transformers_model() -> None:
    """Nothing is known of it."""
    with pytest.raises(Uncountable, match="Linear is no decoder of Transformers"):
        count(torch.nn.Linear(2, 2))


class OtherLinear(torch.nn.Linear):
    """A head whose gradient a chunked loss can't compute in forward, because it may not be a plain product."""


def test_a_chunked_loss_that_recomputes_the_head_is_work_for_the_hardware() -> None:
    """Once more than forward; a plain head's gradient is computed in forward, and nothing twice."""
    from torchturbo.objectives import chunked

    ids = torch.arange(120)[None] + 5
    plain, other = build("llama"), build("llama")
    other.lm_head.__class__ = OtherLinear
    for model in (plain, other):
        chunked.install(model, 32)

    def train() -> None:
        other(input_ids=ids, labels=ids, num_items_in_batch=1).loss.backward()

    assert close(counted(train)) == count(other).hardware(120, 120 * 120)
    head = 2 * 120 * 32 * 320
    assert count(other).hardware(120, 120 * 120) - count(plain).hardware(120, 120 * 120) == head
    assert count(other).model(120, 120 * 120) == count(plain).model(120, 120 * 120)
