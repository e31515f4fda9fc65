"""Visibility: what the slots of a block attend to, as a rule, and as the mask of an attention.

Keys are those of the context, one a token of the row, and behind them those of all blocks: [S + A*K]. A slot of the
block of anchor p sees the context before p, of p's own document and at most a window's length back, and all slots of
its own block, in both directions. It sees no other block, and not the context at p: when the draft runs, the target
has not computed that token yet. The slots of a block that only fills up see each other, so that no row of
attention is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchturbo.objectives.dspark.anchors import Blocks, Sequences

FEW = 1 << 22
"""Entries of a mask up to which a dense one is the cheaper."""
NARROWEST = 16
"""Width of a head from which flex attention has a kernel."""


@dataclass
class Visibility:
    """Where the blocks of a micro-batch stand in their rows, and what they see there."""

    anchors: Tensor
    """[B, A]."""
    keep: Tensor
    """[B, A], bool."""
    documents: Tensor
    """[B, S]: of the context."""
    context_positions: Tensor
    """[B, S]: of the context's keys."""
    positions: Tensor
    """[B, A, K]: of the blocks' queries and keys."""
    _made: dict[tuple[int | None, bool], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, blocks: Blocks, sequences: Sequences) -> Visibility:
        """Return what blocks see of the sequences that they were drawn from."""
        return cls(blocks.anchors, blocks.keep, sequences.documents, sequences.positions, blocks.positions)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of queries A*K and of keys S + A*K."""
        queries = self.positions[0].numel()
        return queries, self.documents.shape[1] + queries

    def rule(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the rule ``(row, head, query, key) -> bool`` over index tensors, as flex attention takes one."""
        length, size = self.documents.shape[1], self.positions.shape[2]

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // size
            anchor = self.anchors[row, block]
            at = key.clamp(max=length - 1)
            context = (key < anchor) & (self.documents[row, at] == self.documents[row, anchor]) & self.keep[row, block]
            if window is not None:
                context = context & (key >= anchor - window)
            return context | ((key >= length) & ((key - length) // size == block))

        return sees

    def dense(self, window: int | None = None) -> Tensor:
        """Return the mask [B, 1, A*K, S + A*K], bool, True for what is seen; at most ``window`` before an anchor."""
        if (window, True) not in self._made:
            queries, keys = (torch.arange(size, device=self.anchors.device) for size in self.sizes)
            rows = torch.arange(len(self.anchors), device=self.anchors.device)[:, None, None]
            mask = self.rule(window)(rows, rows, queries[None, :, None], keys[None, None])
            self._made[window, True] = mask[:, None]
        return self._made[window, True]  # type: ignore[no-any-return]

    def sparse(self, window: int | None = None) -> Any:
        """Return the same as a ``BlockMask`` of torch's flex attention: tiles that nobody looks at cost nothing."""
        if (window, False) not in self._made:
            from torch.nn.attention.flex_attention import create_block_mask

            rule: Any = self.rule(window)
            device: Any = self.anchors.device
            self._made[window, False] = create_block_mask(rule, len(self.anchors), None, *self.sizes, device=device)
        return self._made[window, False]

    def implementation(self, head_dim: int) -> str:
        """Return by which of Transformers' attention functions heads of a width attend: where it pays, the sparse one.

        Flex attention takes heads from 16 on, and casts nothing: under autocast norms leave queries and keys wider than
        values.
        """
        queries, keys = self.sizes
        device = self.anchors.device
        fits = head_dim >= NARROWEST and not torch.is_autocast_enabled(device.type)
        return "flex_attention" if fits and queries * keys > FEW and _has_flex(device) else "sdpa"

    def mask(self, implementation: str, window: int | None = None) -> Any:
        """Return the mask as an attention function takes it."""
        return self.sparse(window) if implementation == "flex_attention" else self.dense(window)


def _has_flex(device: torch.device) -> bool:
    """Return whether flex attention is compiled and differentiated on a device: on CUDA, by Triton."""
    from torch.utils._triton import has_triton

    return device.type == "cuda" and has_triton()
