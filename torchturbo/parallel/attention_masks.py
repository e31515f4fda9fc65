"""Attention masks of whole micro-batches, made by Transformers' own functions for models that see a part of them.

A model that computes a part of each sequence can't make its masks: it would make them for the part. Here they are made
once for a micro-batch and each window of attention, with what the model was given: a 2-D mask of padding, positions
that start anew where documents are packed, or a mask that is ready already.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchturbo.ops.replace import innermost
from torchturbo.ops.switches import View


class FullMasks:
    """The masks of one micro-batch.

    Parameters
    ----------
    config
        The model's configuration; what it says of windows is replaced by what an attention asks for.
    given
        The caller's ``attention_mask``: [B, S] with 0 for padding, [B or 1, H or 1, S, S] ready for attention (bool
        with True for a pair that attends, or added to the scores), or None.
    positions
        ``position_ids`` [B or 1, padded] of the padded sequence.
    length, padded
        S, and the length that sequences are padded to.
    finds_documents
        Whether the model looks for packed documents in the positions: :func:`finds_documents`.

    """

    def __init__(
        self, config: Any, given: Any, positions: Tensor, length: int, padded: int, finds_documents: bool = True
    ) -> None:
        self.config, self.length = config, length
        self.positions = positions if finds_documents else None
        self.given = _padded_mask(given, length, padded)
        # A causal model never sees padding at the end; one that attends to both sides would.
        if self.given is None and padded > length and not getattr(config, "is_causal", True):
            self.given = (torch.arange(padded, device=positions.device) < length)[None]
        self._made: dict[tuple[str, int | None, torch.dtype], Any] = {}

    def mask(self, implementation: str, window: int | None, query: Tensor) -> Any:
        """Return the mask of an attention, in the form that its implementation takes; None where it needs none.

        Parameters
        ----------
        implementation
            Name of the attention function, as Transformers' registry of masks has it.
        window
            Tokens that a query sees at most, itself included; None for all before it.
        query
            [B, H, padded, D], of which only shape, number format and device are of interest.

        """
        if self.given is not None and len(self.given.shape) == 4:
            added = isinstance(self.given, Tensor) and self.given.dtype != torch.bool  # flex attention has an own kind
            return self.given.to(query.dtype) if added else self.given
        key = (implementation, window, query.dtype)
        if key not in self._made:
            self._made[key] = self._make(*key, query)
        return self._made[key]

    def _make(self, implementation: str, window: int | None, dtype: torch.dtype, query: Tensor) -> Any:
        from transformers import masking_utils

        said: dict[str, Any] = {"_attn_implementation": implementation}
        make: Callable[..., Any] = masking_utils.create_causal_mask
        if window is not None:
            said["sliding_window"] = window
            make = masking_utils.create_sliding_window_causal_mask
        like = query.new_empty((), dtype=dtype).expand(query.shape[0], query.shape[2], 1)  # stands for the embeddings
        cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"  # an older name
        mask = make(View(self.config, said), like, self.given, **{cache: None}, position_ids=self.positions)
        if isinstance(mask, Tensor) and mask.is_floating_point() and query.shape[2] > self.length:
            # A row of padding on the left sees nothing, and then all keys alike: those added here are none of them.
            mask = mask.clone()
            mask[..., : self.length, self.length :] = -torch.inf
        return mask


def _padded_mask(given: Any, length: int, padded: int) -> Tensor | None:
    """Return a mask with the padding at the end masked: no token attends to it, and it attends to itself."""
    if given is None or padded == length and len(given.shape) in (2, 4):
        return given  # type: ignore[no-any-return]
    more = padded - length
    if len(given.shape) == 2:
        return functional.pad(given, (0, more))
    if len(given.shape) != 4 or not isinstance(given, Tensor):
        raise ValueError(
            f"expected an attention_mask [B, S] or [B, H, S, S], got {type(given).__name__} {list(given.shape)}"
        )
    nothing = False if given.dtype == torch.bool else torch.finfo(given.dtype).min
    wider = functional.pad(given, (0, more, 0, more), value=nothing)
    itself = torch.arange(length, padded, device=given.device)
    wider[..., itself, itself] = given.dtype == torch.bool  # True attends; so does 0 that is added to a score
    return wider


def finds_documents(model: nn.Module) -> bool:
    """Return whether a Transformers model hands ``position_ids`` to the functions that make its masks.

    Those find the documents of packed rows by them. A few models do not, and attend from one document to the next.
    """
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        plain = innermost(kind.forward)
        if any(name.startswith("create_") and name.endswith("_mask") for name in plain.__code__.co_names):
            return "position_ids" in _named_in_mask_calls(plain)
    return True


def _named_in_mask_calls(function: Any) -> set[str]:
    """Return the keywords of calls that make masks, and the keys of mappings that hold such keywords."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return {"position_ids"}
    names: set[str] = set()
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Call):
            found = {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Dict):
            found = {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        names |= found if {"config", "attention_mask"} <= found else set()
    return names
