"""A tiny LLaDA2-MoE, and a folder of its weights as inclusionAI publishes them: names and configuration as facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import tiny
from torchturbo.models import register

register()
KIND = "llada2_moe"
LAYERS, EXPERTS = 3, 8
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
AUTO_MAP = {
    "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
    "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
    "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
}

MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": AUTO_MAP,
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "norm_head": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_key_value_heads": 4,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-06,
    "head_dim": 128,
    "num_shared_experts": 1,
    "use_cache": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "vocab_size": 157184,
    "rotary_dim": 64,
    "using_split_qkv_in_self_attention": False,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "use_sliding_window": False,
}
"""The mini model's ``config.json`` (inclusionAI/dFactory, configs/model_configs), under the Hub's ``model_type``."""
FLASH = MINI | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
}
"""That of the flash model."""


def published_names() -> list[str]:
    """Return the names of a published checkpoint's tensors, for the tiny model's layers and experts."""
    gated = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    names = ["model.word_embeddings.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(LAYERS):
        attention = ("query_key_value", "dense", "query_layernorm", "key_layernorm")
        inside = [f"attention.{name}.weight" for name in attention]
        inside += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        if layer == 0:
            inside += [f"mlp.{name}" for name in gated]
        else:
            inside += ["mlp.gate.weight", "mlp.gate.expert_bias"]
            inside += [f"mlp.shared_experts.{name}" for name in gated]
            inside += [f"mlp.experts.{expert}.{name}" for expert in range(EXPERTS) for name in gated]
        names += [f"model.layers.{layer}.{name}" for name in inside]
    return sorted(names)


def model(spread: float = 0.2, **changes: Any) -> Any:
    """Return a random model whose routers and norms have decided opinions; its weights have that deviation."""
    made = tiny.model(KIND, **(SIZES | changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if "inv_freq" not in name:
                middle = 1.0 if "norm" in name else 0.0
                tensor.copy_(middle + spread * torch.randn(tensor.shape, generator=generator))
    return made


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors under the published names: experts one by one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        block, stacked, _ = name.partition(".experts.")
        if not stacked:
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            if name.endswith("down_proj"):
                found[f"{block}.experts.{expert}.down_proj.weight"] = own
            else:
                halves = own.split(len(own) // 2)
                found[f"{block}.experts.{expert}.gate_proj.weight"] = halves[0]
                found[f"{block}.experts.{expert}.up_proj.weight"] = halves[1]
    return found


def publish(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Tensor]:
    """Write a folder as published, its code included, which nobody may run; return the tensors that it holds."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    made = model(**changes)
    formats = {name: torch.float32 if name.endswith("expert_bias") else dtype for name in published_names()}
    held = apart(dict(made.state_dict()))
    tensors = {name: held[name].to(formats[name]).clone() for name in published_names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = MINI | {name: value for name, value in made.config.to_dict().items() if name in MINI and value is not None}
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "auto_map": AUTO_MAP, "model_type": KIND}
    config |= {"architectures": ["LLaDA2MoeModelLM"], "transformers_version": "4.52.3"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_llada2_moe.py").write_text("raise RuntimeError('the published code was run')\n")
    (folder / "modeling_llada2_moe.py").write_text("from .configuration_llada2_moe import LLaDA2MoeConfig\n")
    return tensors
