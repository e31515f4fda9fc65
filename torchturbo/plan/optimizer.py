"""What each optimizer keeps for a parameter, for those whose state has the parameter's own shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchturbo.plan.memory import ADAMW, MUON, Rule, Weight

RULES = {
    "adamw_torch": ADAMW,
    "adamw_torch_fused": ADAMW,
    "stable_adamw": ADAMW,
    "sgd": Rule(0, 0),
    "adagrad": Rule(1, 1),
    "rmsprop": Rule(1, 1),
}
"""By Transformers' name (``--optim``). The state of others is factored, quantised or a package's own affair."""
WORDS = {ADAMW: "two fp32 moments", MUON: "one fp32 momentum", Rule(0, 0): "none", Rule(1, 1): "one fp32 mean"}


class Optimizer(NamedTuple):
    """An optimizer and what it keeps."""

    name: str
    rules: tuple[Rule, ...] | None
    """One for each parameter; None where it is not known."""
    words: str


def optimizer_of(weights: Sequence[Weight], optim: str, ours: str | None, matrices: Collection[str]) -> Optimizer:
    """Return the optimizer of a run.

    Parameters
    ----------
    optim
        The framework's, by Transformers' name.
    ours
        The engine's own, which replaces it: ``muon``, or None.
    matrices
        Names of the parameters that Muon would update.

    """
    if ours == "muon":
        rules = tuple(MUON if weight.name in matrices else ADAMW for weight in weights)
        return Optimizer("muon", rules, f"matrices {WORDS[MUON]}, AdamW's {WORDS[ADAMW]}")
    rule = RULES.get(optim)
    if rule is None:
        return Optimizer(optim, None, f"not known for {optim}")
    return Optimizer(optim, (rule,) * len(weights), WORDS[rule])
