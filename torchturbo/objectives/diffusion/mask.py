"""The attention mask of block diffusion: which tokens of ``[noisy ; clean]`` see which, in the form an attention takes.

With b the block of a token in its half, a query sees a key (LLaDA2.0's report, eq. 3, after BD3-LM, arXiv:2503.09573)

* in the block diagonal: both are in the same half, and in the same block;
* in the offset block causal part: the query is noisy, the key is clean and in an earlier block;
* in the block causal part: both are clean, and the key is in no later block;

and both are in the same document of a packed row. Noisy tokens never see what they are to predict, and nothing clean
ever sees noise. Padding sees itself alone, so that no row of a softmax is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KINDS = ("sdpa", "eager", "flex_attention")
"""Attentions that can express these masks, by their names in Transformers."""
Rule = Callable[[Any, Any, Any, Any], Any]
"""``(row, head, query, key)`` to whether the query sees the key: tensors that broadcast, as flex attention has it."""


def sees(query: int, key: int, length: int, block_size: int) -> bool:
    """Return whether a query sees a key, both counted from 0 to 2 x ``length`` - 1: the rule as it is written down."""
    clean_query, clean_key = query >= length, key >= length
    block_query, block_key = (query % length) // block_size, (key % length) // block_size
    block_diagonal = clean_query == clean_key and block_query == block_key
    offset_block_causal = not clean_query and clean_key and block_query > block_key
    block_causal = clean_query and clean_key and block_query >= block_key
    return block_diagonal or offset_block_causal or block_causal


def doubled_rule(documents: Tensor | None, length: int | Tensor, block_size: int) -> Rule:
    """Return the rule of doubled sequences.

    Parameters
    ----------
    documents
        The document of each token [B, 2L], 0 for padding; None where every row is one document.
    length, block_size
        L, and the tokens of a block; documents begin at blocks. A compiled attention takes L as a scalar tensor, and is
        not compiled anew for each length.

    """

    def rule(row: Any, head: Any, query: Any, key: Any) -> Any:
        clean_query, clean_key = query >= length, key >= length
        block_query, block_key = (query % length) // block_size, (key % length) // block_size
        block_diagonal = (clean_query == clean_key) & (block_query == block_key)
        offset_block_causal = ~clean_query & clean_key & (block_query > block_key)
        block_causal = clean_query & clean_key & (block_query >= block_key)
        seen = block_diagonal | offset_block_causal | block_causal
        return seen if documents is None else _within(documents, row, query, key, seen)

    return rule


def prefix_rule(block_size: int) -> Rule:
    """Return the rule of a plain sequence that is decoded block by block: a token sees its block and those before."""

    def rule(row: Any, head: Any, query: Any, key: Any) -> Any:
        return query // block_size >= key // block_size

    return rule


def _within(documents: Tensor, row: Any, query: Any, key: Any, seen: Any) -> Any:
    mine, its = documents[row, query], documents[row, key]
    return (seen & (mine == its) & (mine != 0)) | (query == key)


def attention_mask(kind: str, rule: Rule, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the mask of a rule for an attention.

    Parameters
    ----------
    kind
        One of :data:`KINDS`. sdpa and eager get a tensor of ``dtype`` [rows, 1, length, length] that is added to the
        scores (a boolean one is right with sdpa alone: eager would add 0 and 1). Flex attention gets a ``BlockMask``,
        for which no tensor of this size is kept.
    rows, length
        Rows of the mask: B, or 1 where all are alike; and the sequence's length in all.

    """
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        # Compiled it is never dense, not even in bool; on a CPU compiling takes longer than all else.
        compiled = device.type != "cpu"
        return create_block_mask(rule, rows, None, length, length, device=str(device), _compile=compiled)
    at = torch.arange(length, device=device)
    row = torch.arange(rows, device=device)[:, None, None, None]
    seen = rule(row, None, at[:, None], at[None, :]).expand(rows, 1, length, length)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
