"""A tiny mixture of experts of every family: 8 experts, of which a token meets 2."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from torchturbo.models import register

register()
E = 8
FEW = {
    "num_experts": E, "n_routed_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LOCAL = {"num_local_experts": E, "num_experts_per_tok": 2}
LATENT = FEW | {
    "n_group": 2, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
INDEXED = LATENT | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "n_group": 1}
STREAMED = FEW | {
    "head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_topk": 2, "index_n_heads": 2,
    "index_head_dim": 8, "hc_mult": 2, "hc_sinkhorn_iters": 3, "sliding_window": 4, "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"], "mlp_layer_types": ["hash_moe", "moe"],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
LINEAR = FEW | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "afmoe": FEW | {"num_shared_experts": 1},
    "cohere2_moe": FEW,
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v4": STREAMED,
    "dots1": FEW,
    "ernie4_5_moe": {"moe_num_experts": E, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0,
                     "moe_num_shared_experts": 1},
    "exaone_moe": FEW | {"num_shared_experts": 1},
    "flex_olmo": FEW,
    "gemma4_text": FEW | {"top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 8,
                          "vocab_size_per_layer_input": 320, "global_head_dim": 16,
                          "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": FEW | {"n_group": 2},
    "glm4_moe_lite": INDEXED,
    "glm_moe_dsa": INDEXED,
    "gpt_oss": LOCAL,
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": E, "moe_topk": 2, "moe_intermediate_size": 24},
    "hy_v3": FEW | {"num_shared_experts": 1},
    "laguna": FEW | {"shared_expert_intermediate_size": 24},
    "llada2_moe": FEW | {"n_group": 2, "num_shared_experts": 1},
    "mimo_v2_flash": FEW,
    "minimax": LOCAL,
    "minimax_m2": LOCAL,
    "mixtral": LOCAL,
    "olmoe": FEW,
    "phimoe": LOCAL | {"sliding_window": None},
    "qwen2_moe": FEW | {"shared_expert_intermediate_size": 40},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_moe": FEW,
    "qwen3_next": LINEAR,
    "solar_open": FEW,
}  # fmt: skip
"""The configuration of a tiny model of each family in the table."""


def build(kind: str = "qwen3_moe", **changes: Any) -> Any:
    """Return a model with decided routers, and with numbers in everything that starts as zeros."""
    model = tiny.model(kind, **(MODELS[kind] | changes))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and (not tensor.any() or ("weight" in name and "gate." in name)):
                spread = 0.3 if tensor.dim() > 1 else 0.05
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
            elif name.endswith("tid2eid"):  # a table from tokens to experts
                tensor.copy_(torch.rand(len(tensor), E, generator=generator).argsort(1)[:, : tensor.shape[1]])
    model.config.use_cache = False
    if kind == "phimoe":  # its router draws lots while it trains
        for module in model.modules():
            if type(module).__name__ == "PhimoeTopKRouter":
                module.training = False
                module.train = lambda mode=True: None
    return model
