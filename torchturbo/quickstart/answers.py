"""Ask a model: the answers to all held-out tickets, generated in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchturbo.quickstart.tickets import Row

LONGEST = 32
"""Tokens after which an answer is cut; the wanted ones have at most 18."""


def ask(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Return the answers of the model in a folder, the likeliest token at each step, so always the same.

    The prompts form one left-padded batch, which takes a third of the time of one prompt after the other.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in rows
    ]
    ids, mask = left_padded(prompts, tokenizer.pad_token_id)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=LONGEST,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    answers: list[str] = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Any, Any]:
    """Return token ids and attention mask of prompts as two tensors [rows, longest], padded on the left.

    On the left because generation goes on from the last column.
    """
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask
