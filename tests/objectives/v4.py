"""A tiny DeepSeek-V4 in fp32, with all three kinds of attention and both kinds of routers, and its checkpoints' names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ALL = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
VOCABULARY, HIDDEN, STREAMS, EXPERTS, WINDOW, RANK = 64, 32, 2, 4, 4, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 2,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 3,
    "sliding_window": WINDOW,
    "layer_types": list(ALL),
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}
DSPARK: dict[str, Any] = {
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 63,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": RANK,
}
"""What a checkpoint with DSpark says more; its number of serial heads is not that of its stages."""
BLOCK = (
    *(f"attn.{name}.weight" for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")),
    *("attn.attn_sink", "attn_norm.weight", "ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias"),
    *(f"ffn.experts.{expert}.{name}.weight" for expert in range(EXPERTS) for name in ("w1", "w2", "w3")),
    *(f"ffn.shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
    *(f"hc_{half}_{name}" for half in ("attn", "ffn") for name in ("fn", "base", "scale")),
)
"""Names of a block's tensors in published checkpoints, below ``mtp.N.``."""
JOIN = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")


def serial_names(depths: int) -> set[str]:
    """Return the names of the tensors of heads for multi-token prediction in published checkpoints."""
    more = (*(f"{name}.weight" for name in ("enorm", "hnorm", "e_proj", "h_proj")), *JOIN)
    return {f"mtp.{depth}.{name}" for depth in range(depths) for name in (*BLOCK, *more)}


def stage_names(stages: int = 3) -> set[str]:
    """Return the names of the tensors of DSpark's stages in published checkpoints."""
    last = (*JOIN, "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
    return (
        {f"mtp.{stage}.{name}" for stage in range(stages) for name in BLOCK}
        | {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight"}
        | {f"mtp.{stages - 1}.{name}" for name in last}
    )


def config(**changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model("deepseek_v4", **(SIZES | changes))


def model(seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model: random, with hashed routes, and with decided numbers in everything that starts as zeros."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return stir(AutoModelForCausalLM.from_config(config(**changes)), seed)


def stir(module: nn.Module, seed: int = 0) -> Any:
    """Give a module numbers far from its initialisation, under which everything weighs, and return it."""
    generator = torch.Generator().manual_seed(seed + 1)

    def drawn(tensor: Tensor, spread: float) -> Tensor:
        return (torch.randn(tensor.shape, generator=generator) * spread).to(tensor)

    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), EXPERTS, generator=generator).argsort(1)[:, : tensor.shape[1]])
            elif "inv_freq" in name:
                continue
            elif "norm" in name:
                tensor.copy_(1 + drawn(tensor, 0.2))
            else:
                tensor.copy_(drawn(tensor, 0.3 if tensor.dim() > 1 else 0.2))
    return module


def named(heads: Any) -> dict[str, Tensor]:
    """Return heads' tensors, as leaves, under the names that checkpoints have for them."""
    from transformers.core_model_loading import revert_weight_conversion

    class Model:
        _weight_conversions, config = heads.transforms, None

    tensors = {f"mtp.{name}": value.detach().clone() for name, value in heads.state_dict().items()}
    made = revert_weight_conversion(Model, tensors)
    return {name: value.requires_grad_(value.is_floating_point()) for name, value in made.items()}


def batch(rows: int = 2, length: int = 14, prompt: int = 2, seed: int = 5, **more: Any) -> dict[str, Any]:
    """Return a micro-batch whose first tokens are no targets."""
    ids = torch.randint(3, VOCABULARY - 2, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels, **more}


def double(model: Any) -> Any:
    """Return a model in float64, with the experts' own code: grouped matrix products know no such format."""
    model.set_experts_implementation("eager")
    return model.double()


@contextmanager
def in_double(monkeypatch: Any) -> Iterator[None]:
    """Let Transformers' V4 compute in float64 where it insists on float32, for comparisons to more digits."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    def normed(self: Any, hidden: Tensor) -> Tensor:
        wide = hidden.double()
        return self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(modeling.DeepseekV4RMSNorm, "forward", normed)
        yield


def read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder by name."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def official(name: str) -> str:
    """Return the published name of one of the model's tensors that Transformers wrote."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace("attn.norm.", "attn.kv_norm.")
