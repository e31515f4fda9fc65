"""Whether a model keeps to a mask: found by running it, since what its attention makes of one is each model's affair.

Some forwards ignore a mask [B, 1, S, S], and some put a causal one over it. A model of either kind would train without
an error, on what it was to predict or blind to half of its block.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.engine.backends.fsdp2.shard import reshard
from torchturbo.logging import get_logger
from torchturbo.objectives.diffusion.noise import DOUBLED, Doubled

MOST, MOST_BF16 = 1e-3, 3e-2
"""Relative change of the logits that rounding explains."""
LEAST_BLOCK = 2
log = get_logger(__name__)


class Failed(str):
    """What a model does against its masks where its forward raised."""


@torch.no_grad()
def obstacle(
    model: nn.Module, vocabulary: int, divisor: int, device: torch.device, autocast: AbstractContextManager[object]
) -> str | None:
    """Return what a model that block diffusion is installed in does against its masks; None for nothing. A collective.

    Three rows of two blocks, ``[noisy ; clean]``, are alike but for a token of the second clean block, which no noisy
    token sees, and for those of the first noisy block behind its first, which sees them; a causal mask would hide them.
    What moves less than rounding explains has not been seen.

    Parameters
    ----------
    vocabulary
        Tokens that the model knows.
    divisor
        The ranks that share a sequence.
    device
        Where the model computes.
    autocast
        The context that it computes in.

    """
    block = math.lcm(LEAST_BLOCK, divisor)
    length = 2 * block
    row = torch.arange(1, 2 * length + 1, device=device) % vocabulary
    rows = row.repeat(3, 1)
    rows[1, -1] = (rows[1, -1] + 2) % vocabulary
    rows[2, 1:block] = (rows[2, 1:block] + 2) % vocabulary
    positions = torch.arange(length, device=device).repeat(2).expand(3, -1)
    batch: dict[str, Any] = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "position_ids": positions}
    was_training = model.training
    model.eval()
    try:
        with autocast:
            output: Any = model(**batch, **{DOUBLED: Doubled(length, block, whole=True)})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a forward makes of a mask that it does not know
        log.debug("block diffusion: a forward on two blocks failed", exc_info=True)
        return Failed(f"fails with its mask of two blocks: {type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        model.train(was_training)
        reshard(model)
    return _told(output.logits, length)


def _told(logits: Tensor, length: int) -> str | None:
    """Return what logits [3, 2L, V] show."""
    most = MOST_BF16 if logits.dtype in (torch.bfloat16, torch.float16) else MOST
    seen = logits.float()
    allowed = most * float(seen[0].abs().max())
    leaked = float((seen[1, :length] - seen[0, :length]).abs().max())
    if leaked > allowed:
        return f"lets tokens see what its mask hides (logits move by {leaked:.3g})"
    noise = max(leaked, MOST * float(seen[0].abs().max()))  # as it was met, since a sight may be a faint one in bf16
    if float((seen[2, 0] - seen[0, 0]).abs().max()) <= noise:
        return "does not let a token see the later ones of its block: it puts a causal mask over the one it is given"
    return None
