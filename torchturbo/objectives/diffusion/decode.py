"""Decoding: an answer is written block by block, each by unmasking, step by step, what the model is surest of.

As LLaDA2.0 decodes by its report: a block begins as masks behind the text so far; each forward predicts all of them;
those with a probability above a threshold are kept, and at least as many of the likeliest as fill the block in its
steps. Without a cache, so each forward is the one of training: a block sees the finished text before it and itself. For
evaluation and for trying a model out, not for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.engine.backends.fsdp2.shard import reshard
from torchturbo.engine.model import base_model
from torchturbo.objectives.diffusion.mask import KINDS, attention_mask, prefix_rule
from torchturbo.objectives.diffusion.models import fill_token, mask_token, rounded_up
from torchturbo.objectives.diffusion.objective import attention_of
from torchturbo.parallel.ulysses import NAME as SHARING


@torch.no_grad()
def decode(
    model: nn.Module,
    prompt: Tensor | Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    steps: int | None = None,
    threshold: float = 0.95,
    mask_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> list[int]:
    """Return the tokens with which a diffusion model answers a prompt, without what ends the answer.

    Under FSDP2 and expert parallelism every forward is a collective, and how many there are follows from what is
    written: all ranks decode the same prompt with the same settings. Under sequence parallelism nothing is decoded.

    Parameters
    ----------
    model
        A diffusion model, prepared by an engine or not; it is put into evaluation mode for the time.
    prompt
        Token ids [P].
    block_size
        Tokens of a block, as in training.
    max_new_tokens
        The longest answer.
    steps
        Forwards of a block at most; None is one for each of its tokens, the most exact.
    threshold
        Probability above which all tokens are kept at once; 1 or more keeps to the steps.
    mask_token_id
        The token that stands for a hidden one; None asks the model's configuration.
    eos_token_id
        What ends an answer; None asks the model's generation configuration, then its configuration, and takes the
        token that filled up its samples where neither names one.

    Raises
    ------
    ValueError
        There is no mask token, a number is below 1, the model's attention can't express the mask, or ranks share its
        sequences.

    """
    base: Any = base_model(model)
    hidden = mask_token(base.config) if mask_token_id is None else mask_token_id
    ends = _ends(base, eos_token_id)
    hidden = _usable(base, hidden, min(block_size, max_new_tokens, 1 if steps is None else steps))
    given = torch.as_tensor(prompt, dtype=torch.int64, device=base.get_input_embeddings().weight.device).flatten()
    start, length = len(given), rounded_up(len(given) + max_new_tokens, block_size)
    text = torch.cat((given, given.new_full((length - start,), hidden)))
    was_training = model.training
    model.eval()
    try:
        end = _fill(model, text, start, block_size, steps, threshold, hidden, ends)
    finally:
        model.train(was_training)
        reshard(model)
    answer = text[start : min(end, start + max_new_tokens)].tolist()
    stop = next((at for at, token in enumerate(answer) if token in ends), len(answer))
    return answer[:stop]


def _usable(base: nn.Module, hidden: int | None, least: int) -> int:
    """Return the mask token; raise a ValueError for what can't be decoded with. ``least`` is the smallest number given."""
    if hidden is None:
        raise ValueError("no mask token: set mask_token_id in the model's config.json, or pass mask_token_id")
    if least < 1:
        raise ValueError(f"expected block_size, max_new_tokens and steps of at least 1; got {least}")
    if (kind := attention_of(base)) == SHARING:
        raise ValueError("ranks share this model's sequences (sp_size); release the engine before decoding")
    if kind not in KINDS:
        raise ValueError(f"{kind} attention can't express the mask of block diffusion; use one of {', '.join(KINDS)}")
    return hidden


def _fill(
    model: nn.Module,
    text: Tensor,
    start: int,
    block_size: int,
    steps: int | None,
    threshold: float,
    hidden: int,
    ends: set[int],
) -> int:
    """Write a text [S] from ``start`` on, in place, up to the block with an end; return where that block ends."""
    open_places = torch.arange(len(text), device=text.device) >= start
    end = start // block_size * block_size
    while end < len(text):
        end += block_size
        _fill_block(model, text[:end], open_places[:end], block_size, steps, threshold, hidden)
        if ends & set(text[start:end].tolist()):
            break
    return end


def _fill_block(
    model: nn.Module,
    text: Tensor,
    open_places: Tensor,
    block_size: int,
    steps: int | None,
    threshold: float,
    hidden: int,
) -> None:
    """Replace the masks in the last block of a text [S], in place; ``open_places`` [S] says where they are, and changes."""
    left = int(open_places[-block_size:].sum())
    most = -(-left // (steps or left))  # tokens that a step must keep, so that the last one finds none
    while left:
        logits = _logits(model, text, block_size)
        logits[:, hidden] = -torch.inf  # a mask is no text
        confidence, tokens = torch.softmax(logits, -1).max(-1)
        confidence = confidence.masked_fill(~open_places[-block_size:], -1.0)
        surest = confidence.topk(min(most, left)).indices
        kept = confidence > threshold
        kept[surest] = True
        at = kept.nonzero().flatten() + len(text) - block_size
        text[at] = tokens[kept]
        open_places[at] = False
        left = int(open_places[-block_size:].sum())


def _logits(model: nn.Module, text: Tensor, block_size: int) -> Tensor:
    """Return the logits [block_size, V] of the last block of a text [S], in float32."""
    base: Any = base_model(model)
    device_type, dtype = text.device.type, base.get_input_embeddings().weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    mask = attention_mask(attention_of(base), prefix_rule(block_size), 1, len(text), dtype, text.device)
    positions = torch.arange(len(text), device=text.device)[None]
    output: Any = model(input_ids=text[None], attention_mask=mask, position_ids=positions)
    logits: Tensor = output.logits[0, -block_size:].float()
    return logits


def _ends(base: Any, given: int | Sequence[int] | None) -> set[int]:
    """Return the tokens that end an answer: those that were given, or the first that the model names."""
    owners = (getattr(base, "generation_config", None), base.config)
    values = (given, *(getattr(owner, "eos_token_id", None) for owner in owners), fill_token(base.config))
    value = next((one for one in values if one is not None), ())
    return {value} if isinstance(value, int) else set(value)
