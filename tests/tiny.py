"""Tiny models and a tokenizer of their own, made from configurations: no hub, no download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog while seven wizards quietly box",
    "hello there, how are you today? fine, thanks. what is the capital of France? Paris.",
    "system user assistant tool red green blue one two three four five six seven eight nine ten",
)
TICKETS = (
    ("my parcel is late", "type: delivery"),
    ("the lamp is broken", "type: damage"),
    ("i want my money back", "type: refund"),
    ("where is my order", "type: delivery"),
)


def tokenizer(template: str | None = CHATML) -> Any:
    """Return a byte-level BPE tokenizer of about 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>")
    wrapped.chat_template = template
    return wrapped


def model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Return a random two-layer model in fp32: ``llama``, ``qwen3``, ``mixtral`` or ``qwen3_moe``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    if kind == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes)))


def checkpoint(model: Any, reentrant: bool) -> None:
    """Turn activation checkpointing on, by the method's newer name where there is one."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def save(folder: Path, kind: str = "llama", template: str | None = CHATML, **changes: Any) -> Path:
    """Write a model folder with its tokenizer."""
    model(kind, **changes).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """Return a chat row of alternating user and assistant turns."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    return {"messages": messages}


def rows(count: int = 8) -> list[dict[str, Any]]:
    """Return chat rows of different lengths."""
    return [chat(f"{TICKETS[at % 4][0]} {'please ' * (at % 3)}", TICKETS[at % 4][1]) for at in range(count)]


def write_jsonl(path: Path, lines: Sequence[Any]) -> Path:
    """Write rows, one JSON value a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
