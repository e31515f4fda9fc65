"""What a run logs of its draft: how much of it the target would accept, and how well the draft knows.

Each is a quotient of sums over slots or blocks, so that ranks and micro-batches may have unequally many of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

LOSS = "dspark_loss"
ACCEPT_RATE = "dspark_accept_rate_{}"
"""Mean chance that the target accepts the token of a slot, counted from 1, where the tokens before it are right."""
LENGTH = "dspark_accepted_length"
"""Mean number of tokens that one forward of the target gives, its own included: 1 + sum over j of c_1 ... c_j."""
CONFIDENCE_ERROR = "dspark_confidence_error"
"""Mean absolute difference between the foretold and the real chance of acceptance, weighted as the loss is."""


def names(size: int, *, confidence: bool) -> list[str]:
    """Return the metrics of blocks of ``size`` slots."""
    rates = [ACCEPT_RATE.format(slot + 1) for slot in range(size)]
    return [*rates, LENGTH, *([CONFIDENCE_ERROR] if confidence else [])]


def acceptance(accepted: Tensor, valid: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, numerator and denominator of what the chances of acceptance say.

    ``accepted`` and ``valid`` are [B, A, K]; what is not valid counts nowhere.
    """
    counted = accepted * valid
    for slot in range(valid.shape[2]):
        yield ACCEPT_RATE.format(slot + 1), counted[..., slot].sum(), valid[..., slot].sum()
    blocks = valid.any(-1)
    yield LENGTH, ((1 + counted.cumprod(-1).sum(-1)) * blocks).sum(), blocks.sum()


def confidence(logits: Tensor, accepted: Tensor, weights: Tensor) -> tuple[str, Tensor, Tensor]:
    """Return name, numerator and denominator of how far confidence logits [N] are off."""
    return CONFIDENCE_ERROR, (weights * (logits.sigmoid() - accepted).abs()).sum(), weights.sum()
