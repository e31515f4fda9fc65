"""Write a small model with random weights and a tokenizer of its own, to try an objective with: no hub, no download.

    python examples/make_model.py mtp runs/tiny-mtp

The kinds are those of the guides: mtp (a DeepSeek-V3 with one multi-token prediction head), dspark (a Qwen3 that a
draft is added to), experts (a mixture of experts, of which two have nearly all tokens), diffusion (a LLaDA2). Each has
a few hundred thousand weights and learns `examples/data` by heart on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
VOCABULARY = 512
PAD, END, MASK = range(3)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DRAFT = {
    "block_size": 4, "num_draft_layers": 1, "target_layer_ids": [0, 1], "mask_token_id": MASK, "markov_rank": 16,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("deepseek_v3", LATENT),
    "dspark": ("qwen3", {"num_hidden_layers": 3, "dspark_config": DRAFT}),
    "experts": ("qwen3_moe", EXPERTS),
    "diffusion": (
        "llada2_moe",
        EXPERTS | {"mask_token_id": MASK, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that is made from the example texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train([str(path) for path in sorted(DATA.iterdir())], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", mask_token="<|mask|>"
    )


def write(kind: str, folder: Path) -> None:
    """Write a model and its tokenizer into a folder."""
    model_type, sizes = KINDS[kind]
    if model_type == "llada2_moe":
        from torchturbo.models import llada2

        llada2.register()  # Transformers has none
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | sizes))
    if kind == "mtp":
        write_with_head(config, folder)
    else:
        model = AutoModelForCausalLM.from_config(config)
        if kind == "experts":
            skew(model)
        model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def skew(model: Any) -> None:
    """Let two experts of each layer have nearly all tokens: all embeddings share a part, which two rows of a router ask for."""
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.02)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[:2].add_(0.06)


def write_with_head(config: Any, folder: Path) -> None:
    """Write a DeepSeek-V3 as it is published: its head is one layer more, with two norms, a projection and a last norm."""
    layers, width = config.num_hidden_layers, config.hidden_size
    config.num_hidden_layers = layers + 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = {name: torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    head["eh_proj"] = torch.randn(width, 2 * width) * config.initializer_range
    tensors |= {f"model.layers.{layers}.{name}.weight": value for name, value in head.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text("utf-8"))
    written |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write(given.kind, given.folder)
    print(f"{given.kind}: {given.folder}")


if __name__ == "__main__":
    main()
