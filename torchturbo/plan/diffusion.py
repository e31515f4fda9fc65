"""Block diffusion in a plan: how long a diffusion model's sequences become, what their mask takes, and what is run.

A batch is doubled, ``[noisy ; clean]``, as :mod:`torchturbo.objectives.diffusion.noise` does it. Here all tokens of the
noisy half are hidden, the most that there can be.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchturbo.objectives.chunked import head_of
from torchturbo.objectives.diffusion.cap import Cap, Looking, confident_entropy
from torchturbo.objectives.diffusion.models import rounded_up
from torchturbo.objectives.diffusion.objective import attention_of
from torchturbo.objectives.normalise import IGNORE_INDEX

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig


def doubled(length: int, config: EngineConfig, sp_size: int) -> int:
    """Return the tokens of both halves of a sequence of ``length``: whole blocks, which the ranks of a group share."""
    return 2 * rounded_up(length, math.lcm(config.diffusion.bd_block_size, sp_size))


def mask_dtype(base: nn.Module, config: EngineConfig) -> torch.dtype | None:
    """Return the format of the mask [B, 1, 2L, 2L]; None for flex attention, which keeps none of this size."""
    if attention_of(base) == "flex_attention":
        return None
    return torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32


class DoubledBatch:
    """A doubled micro-batch without data, and the loss of it.

    Parameters
    ----------
    base
        The Transformers model.
    config
        Of the engine.
    rows, length
        Rows, and the tokens of both halves that one rank has.
    sp_size
        Ranks that share a sequence: the first of them may have the noisy half alone.
    dtype
        The number format of the mask; None for none.

    """

    def __init__(
        self, base: Any, config: EngineConfig, rows: int, length: int, sp_size: int, dtype: torch.dtype | None
    ) -> None:
        self.base, self.weight = base, config.diffusion.cap_lambda
        self.hidden = length if sp_size > 1 else length // 2
        """Tokens of a row that are learned."""
        self.target = torch.zeros(rows, self.hidden, dtype=torch.long)
        self.given: dict[str, Any] = {
            "input_ids": torch.zeros(rows, length, dtype=torch.long),
            "position_ids": torch.zeros(rows, length, dtype=torch.long),
            "attention_mask": None if dtype is None else torch.zeros(rows, 1, length, length, dtype=dtype),
        }

    def loss(self, model: Any) -> Tensor:
        """Return the loss of a model's own forward, with CAP where it weighs something."""
        given, target = dict(self.given), self.target
        rest = given["input_ids"].shape[1] - self.hidden
        if rest and "logits_to_keep" in inspect.signature(self.base.forward).parameters:
            given["logits_to_keep"] = torch.arange(self.hidden)
        elif rest:
            target = functional.pad(target, (0, rest), value=IGNORE_INDEX)
        cap = Cap(self.base)
        if self.weight:
            self.base.loss_function = Looking(cap, self.base.loss_function)
        loss: Tensor = model(**given, labels=target, shift_labels=target).loss
        return loss if cap.found is None else loss + self.weight * cap.found[0]

    def states(self) -> tuple[Tensor, Tensor]:
        """Return states [N, H] of the learned tokens that a forward of the decoder gives, and their targets [N]."""
        found = self.base.base_model(**self.given)[0]
        return found[:, : self.hidden].flatten(0, 1), self.target.flatten()

    def cap(self, states: Tensor, chunk_size: int) -> Tensor:
        """Return CAP of states [N, H], of which a chunk at a time meets the vocabulary, and again in backward."""
        head: Any = head_of(self.base)

        def chunk(rows: Tensor, target: Tensor) -> Tensor:
            return confident_entropy(functional.linear(rows, head.weight, head.bias), target)[0]

        total: Tensor = states.new_zeros(())
        if not self.weight:
            return total
        for rows in torch.split(torch.arange(self.target.numel()), chunk_size):
            picked = states.index_select(0, rows), self.target.flatten().index_select(0, rows)
            total = total + checkpoint(chunk, *picked, use_reentrant=False)
        return self.weight * total
