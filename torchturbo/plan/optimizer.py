"""What each optimizer keeps for a parameter, for those whose state has the parameter's own shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torchturbo.optim.kept import NAMES, kept
from torchturbo.plan.memory import ADAMW, MUON, Rule, Weight

WORDS = {ADAMW: "two fp32 moments", MUON: "one fp32 momentum", Rule(0, 0): "none", Rule(1, 1): "one fp32 mean"}


class Optimizer(NamedTuple):
    """An optimizer and what it keeps."""

    name: str
    rules: tuple[Rule, ...] | None
    """One for each parameter; None where it is not known."""
    words: str


def optimizer_of(
    weights: Sequence[Weight], optim: str, ours: str | None, matrices: Collection[str], optim_args: str | None = None
) -> Optimizer:
    """Return the optimizer of a run.

    Parameters
    ----------
    optim
        The framework's, by Transformers' name.
    ours
        The engine's own, which replaces it: ``muon``, or None.
    matrices
        Names of the parameters that Muon would update.
    optim_args
        The framework's further settings (``--optim_args``), ``name=value`` with commas between.

    """
    if ours == "muon":
        rules = tuple(MUON if weight.name in matrices else ADAMW for weight in weights)
        return Optimizer("muon", rules, f"matrices {WORDS[MUON]}, AdamW's {WORDS[ADAMW]}")
    found = kept([NAMES.get(optim, "")], _settings(optim_args))
    if found is None:
        return Optimizer(optim, None, f"not known for {optim}")
    rule = Rule(*found)
    return Optimizer(optim, (rule,) * len(weights), WORDS.get(rule, f"{rule.copies} fp32 means and momenta"))


def _settings(optim_args: str | None) -> dict[str, Any]:
    """Return what of an optimizer's settings adds to its state, read as Transformers does."""
    parts = (part.partition("=") for part in (optim_args or "").replace(" ", "").split(","))
    pairs = {name: value for name, _, value in parts}
    try:
        momentum = float(pairs.get("momentum", 0))
    except ValueError:  # the launch's own complaint
        momentum = 0.0
    return {"momentum": momentum, "centered": pairs.get("centered", "").lower() in ("true", "1", "yes")}
