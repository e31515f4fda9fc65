"""Tiny checkpoints of several families, and their models on a mesh without the engine, for tests of loading and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny

MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"vocab_size": 321, "head_dim": 2}),  # 321 rows do not divide; of 4 ranks 2 get none of 2
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {**MOE, **LATENT, "n_group": 2}),
    "glm4_moe": ("glm4_moe", {**MOE, "n_group": 1}),
    "bare": ("llama", {"tie_word_embeddings": True}),  # saved as the base model, without the prefix "model."
    "fused": ("qwen3_moe", {}),  # saved as the model holds its experts
}


def save(folder: Path, family: str, dtype: str = "bfloat16") -> Path:
    """Write a random checkpoint, in several files."""
    import torch

    kind, changes = FAMILIES[family]
    model = tiny.model(kind, **changes).to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_()  # zeros would hide that it was not read
    saved = model.model if family == "bare" else model
    saved.save_pretrained(folder, max_shard_size="40KB", save_original_format=family != "fused")
    return folder


def empty(folder: Path) -> Any:
    """Return the model of a folder on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="meta")


def shard(model: Any, ep_size: int = 1, dim: int = 1, **settings: Any) -> None:
    """Shard a model by FSDP2, its experts over ``ep_size`` ranks first; FSDP2 then splits their dimension ``dim``.

    ``settings`` are those of ``fully_shard``.
    """
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    experts = init_device_mesh("cpu", (world // ep_size, ep_size), mesh_dim_names=("ep_fsdp", "ep"))
    for layer in model.model.layers:
        module = getattr(layer.mlp, "experts", None)
        if module is not None and ep_size > 1:
            for name, parameter in list(module.named_parameters(recurse=False)):
                whole = parameter.detach()
                placed = distribute_tensor(whole, experts["ep"], [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
            fully_shard(module, mesh=experts["ep_fsdp"], shard_placement_fn=lambda parameter: Shard(dim), **settings)
        fully_shard(layer, mesh=mesh, **settings)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def whole(model: Any) -> dict[str, Any]:
    """Return a model's tensors by name, sharded ones gathered."""
    from torch.distributed.tensor import DTensor

    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }


def differences(model: Any, reference: Any) -> list[str]:
    """Return the names of the tensors that are not equal bit for bit."""
    import torch

    got, expected = whole(model), whole(reference)
    names = sorted(got.keys() ^ expected.keys())
    return names + [name for name in got.keys() & expected.keys() if not torch.equal(got[name], expected[name])]
