"""Which models' sequences can be shared by ranks, and what is said of those that can't: found without weights."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
import tiny_vlm
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from torchturbo.adapters.hf_data import sequence_clashes
from torchturbo.engine.context import Context
from torchturbo.engine.steps import sequence as step
from torchturbo.parallel.mesh import MeshPlan
from torchturbo.parallel.sequence_check import obstacles


def on_meta(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return tiny.model(kind, **changes)


def messages(model: Any, size: int = 2) -> str:
    return "\n".join(f"{message}; {remedy}" for message, remedy in obstacles(model, size))


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
REFUSED = {
    "linear attention": ("qwen3_next", LINEAR | {"num_experts": 4}, "Qwen3NextGatedDeltaNet: its state would begin anew"),
    "a state": ("mamba", {}, "Conv1d: its state would begin anew"),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ShortConv: its state would begin anew"),
    "no positions": ("bloom", {"n_layer": 2}, "takes no position_ids"),
    "an attention of its own": ("big_bird", {}, "a layer without attention under Transformers' AttentionInterface"),
    "keywords that go no further": ("stablelm", {}, "StableLmDecoderLayer hands no keywords on"),
    "a mask of its own": ("doge", {}, "DogeAttention makes a mask of its own"),
    "positions by the mask": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "counts positions by the mask"),
    "both sides": ("bert", {}, "attends to both sides"),
    "an encoder": ("bart", {"decoder_layers": 1, "encoder_layers": 1}, "takes no position_ids"),
    "the router's loss": ("mixtral", {"output_router_logits": True}, "set output_router_logits to false"),
    "weights of attention": ("llama", {"attn_implementation": "eager", "output_attentions": True}, "set output_attentions"),
    "chunks": ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48}, "chunked_attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_split_is_refused_with_the_reason(name: str) -> None:
    kind, changes, expected = REFUSED[name]

    assert expected in messages(on_meta(kind, **changes))


def test_a_vision_tower_is_refused() -> None:
    assert "has another tower than the language model" in messages(tiny_vlm.model())


FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gpt2",
    "glm4",
    "glm4_moe",
    "phi3",
    "olmo2",
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_can_be_split(kind: str) -> None:
    small = {"n_embd": 32, "n_head": 4, "n_layer": 2} if kind == "gpt2" else {}

    assert "" == messages(on_meta(kind, **small))


def test_heads_that_do_not_divide_name_the_nearest_sizes() -> None:
    """SmolLM2 has nine heads and three for keys and values: three ranks or nine."""
    config = AutoConfig.for_model(
        "llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1, vocab_size=64
    )
    with torch.device("meta"):
        smol = AutoModelForCausalLM.from_config(config)

    assert "9 attention heads do not divide by 2: each rank attends with its share of them; use 1 or 3" == messages(
        smol
    )
    assert messages(smol, 4).endswith("use 3 or 9")
    assert "" == messages(smol, 3) == messages(smol, 9)


def test_everything_that_is_wrong_is_said_at_once_with_its_place() -> None:
    settings = parity.config(parallel_plan={"sp_size": 3})
    model = on_meta("mixtral", output_router_logits=True)

    found = step.check(model, settings, Context(plan=MeshPlan(3, 3)))

    assert 2 == len(found)
    assert {"parallel_plan.sp_size"} == {problem.key for problem in found}
    assert all(problem.place.endswith("parity.json:1:108") and problem.remedy for problem in found)
    assert [] == step.check(model, parity.config(), Context())


def test_prompts_that_peft_puts_in_front_are_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(tiny.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))

    assert "PEFT would put a prompt before each part of a sequence; use LoRA" in messages(model)


def test_a_loss_of_another_kind_is_refused() -> None:
    model = on_meta("llama")
    model.loss_function = lambda **_: torch.zeros(())

    assert "whose parts are not known to add up" in messages(model)


def test_what_the_trainer_was_asked_for_and_can_not_be(tmp_path: Any) -> None:
    """Rows of a rank's own, and losses of whole logits."""
    settings = parity.config(parallel_plan={"sp_size": 2})
    words = {"label_smoothing_factor": 0.1, "train_sampling_strategy": "batch_rebalance", "use_cpu": True}
    args = TrainingArguments(str(tmp_path), **words)

    found = [str(problem) for problem in sequence_clashes(settings, args, compute_loss_func=print)]

    assert 3 == len(found)
    for name, problem in zip(("batch_rebalance", "label smoothing", "compute_loss_func"), found, strict=True):
        assert name in problem and "parity.json:1:108: parallel_plan.sp_size" in problem and "sp_size 1" in problem
    assert [] == sequence_clashes(parity.config(), args, print)
