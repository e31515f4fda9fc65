"""The programs whose training steps are compared: TurboTrainer with an objective, and without, on the same tokens.

All train in one process in fp32 with activation checkpointing, AdamW, clipping and a schedule, as in
``engine_steps.py``; both sides of a pair have one model and one set of rows, and differ in the keys alone.
"""

from __future__ import annotations

from typing import Any

import torch
from engine_pairs import Side, Turns
from engine_steps import LENGTH, TakesTurns, arguments, rows_for
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.generated.keys import KEYS

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "head_dim": 32, "first_k_dense_replace": 99, "num_nextn_predict_layers": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
DRAFT = {
    "block_size": 7, "num_draft_layers": 1, "target_layer_ids": [0, 1, 2], "mask_token_id": 2, "markov_rank": 48,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("deepseek_v3", LATENT),
    "dense": ("qwen3", {}),
    "draft": ("qwen3", {"dspark_config": DRAFT}),
    "experts": ("qwen3_moe", EXPERTS),
    "diffusion": ("qwen3", {"is_diffusion_model": True, "mask_token_id": 2}),
}
"""Model type and further sizes of each model. DeepSeek-V3's layers are all dense here, the head's too."""
CHUNKS = {"loss_chunk.enabled": True}


def make_model(kind: str) -> Any:
    """Return a model, always the same; its heads, where it is to get some, begin as their classes make them."""
    torch.manual_seed(0)
    model_type, sizes = MODELS[kind]
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | sizes))).train()
    model.config.use_cache = False
    return model


def side(name: str, kind: str, **settings: Any) -> Side:
    """Return one program: a model and the keys that it is trained with."""
    return Side(name, train, 1, {"sp_size": 1, "kind": kind, "keys": settings})


def train(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Train by TurboTrainer."""
    words = {"ops.policy": "native"} | settings["keys"]
    set_torchturbo_args(parse_torchturbo_args([f"{KEYS[path].cli}={value}" for path, value in words.items()])[0])
    TurboTrainer(
        model=make_model(settings["kind"]),
        args=arguments(turns, settings),
        train_dataset=rows_for(turns, settings),
        data_collator=default_data_collator,
        callbacks=[TakesTurns(turns)],
    ).train()


def mtp() -> tuple[Side, Side]:
    """Return one depth beside the plain loss, both in chunks."""
    return side("MTP", "latent", **CHUNKS, **{"mtp.enabled": True}), side("plain", "latent", **CHUNKS)


def dspark() -> tuple[Side, Side]:
    """Return a draft of one layer beside the plain loss, both in chunks; as in DeepSpec one token of eight is an anchor."""
    keys = {"mtp.enabled": True, "dspark.num_anchors": LENGTH // 8}
    return side("DSpark", "draft", **CHUNKS, **keys), side("plain", "draft", **CHUNKS)


def routers() -> tuple[Side, Side]:
    """Return both router losses beside none."""
    keys = {"moe.aux_loss_coeff": 0.001, "moe.z_loss_coeff": 0.001}
    return side("router losses", "experts", **keys), side("plain", "experts")


def diffusion() -> tuple[Side, Side]:
    """Return block diffusion, on doubled sequences, beside the plain loss of a causal model."""
    return side("block diffusion", "diffusion"), side("plain", "dense")


def cap() -> tuple[Side, Side]:
    """Return block diffusion with CAP beside it without."""
    return side("CAP", "diffusion", **{"diffusion.cap_lambda": 2.0}), side("block diffusion", "diffusion")


def products(module: nn.Module) -> int:
    """Return the weights of a module that a token is multiplied with: those of its linear maps."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def share_of_a_depth() -> float:
    """Return a depth's products over those of the model: its block, its projection, and the head once more."""
    from torchturbo.engine.config import build_from_args
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    model = make_model("latent")
    plain = products(model)
    config = build_from_args(parse_torchturbo_args([f"{KEYS['mtp.enabled'].cli}=true"])[0])
    Engine(config, Context()).prepare(model)
    return (products(model) - plain + products(model.lm_head)) / plain
