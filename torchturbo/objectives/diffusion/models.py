"""Which models are diffusion models, and the two tokens that their training needs: the mask and the filler.

What its configuration says by an attribute ``is_diffusion_model`` holds, then what its class says by the same name, and
then whether its ``model_type`` stands in the table below, or a plugin has put it there by :func:`register`. Nothing here
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "is_diffusion_model"
MASK, FILL = "mask_token_id", ("pad_token_id", "eos_token_id")
"""Names under which configurations and tokenizers know the tokens."""

SHIFTED = "a loss that is made outside the model shifts its labels, and a diffusion model's are not shifted"
"""Why nothing else may make a diffusion model's loss."""


@dataclass(frozen=True)
class DiffusionModel:
    """One family of diffusion models."""

    family: str
    """How people call it."""
    model_type: str
    """``model_type`` of its configuration."""
    mask_token: int | None = None
    """The token that hides others, where neither configuration nor tokenizer of its checkpoints names one."""
    sequence: str = ""
    """Why the ranks of a group can't share its sequences; empty where they can."""
    experts: str = ""
    """Why its experts can't be divided; empty where they can."""


MODELS: dict[str, DiffusionModel] = {
    row.model_type: row for row in (DiffusionModel("LLaDA2-MoE", "llada2_moe", mask_token=156895),)
}
"""The diffusion models that are known by their type, with the mask token of the published checkpoints.

https://github.com/inclusionAI/dFactory (configs and tasks).
"""


def register(model: DiffusionModel) -> DiffusionModel:
    """Let every model of a type be trained by block diffusion: for a plugin's module, at its top."""
    MODELS[model.model_type] = model
    return model


def is_diffusion_model(model: Any) -> bool:
    """Return whether a model, a PEFT model or a configuration is a diffusion model's.

    Its configuration's word wins over its class's, and that over its type. A configuration alone does not know of the
    class: ask the model, on the meta device, where there is one.
    """
    unwrap = getattr(model, "get_base_model", None)
    base = model if unwrap is None else unwrap()
    config = getattr(base, "config", base)
    for owner in (config, base):
        said = getattr(owner, ATTRIBUTE, None)
        if isinstance(said, bool):
            return said
    return getattr(config, "model_type", None) in MODELS


def attribute_problem(config: Any) -> tuple[str, str] | None:
    """Return the message and the remedy where a configuration says neither true nor false; None where it is well."""
    said = getattr(config, ATTRIBUTE, None)
    if said is None or isinstance(said, bool):
        return None
    return f"{ATTRIBUTE} is {said!r} in its config.json, expected true or false", "write true or false, without quotes"


def mask_token(config: Any, tokenizer: Any = None) -> int | None:
    """Return the token that stands for a hidden one: the configuration's, the tokenizer's, or the family's; or None."""
    row = MODELS.get(getattr(config, "model_type", ""))
    return _first(
        getattr(config, MASK, None), getattr(_inner(tokenizer), MASK, None), None if row is None else row.mask_token
    )


def fill_token(config: Any, tokenizer: Any = None) -> int | None:
    """Return the token that a sample's last block is filled up with: padding, or else the end of a text; or None."""
    return _first(*(getattr(owner, name, None) for name in FILL for owner in (_inner(tokenizer), config)))


def token_problems(config: Any, tokenizer: Any = None) -> list[tuple[str, str]]:
    """Return what is wrong with a diffusion model's two tokens: a message and a remedy each."""
    found = mask_token(config, tokenizer)
    size = getattr(config, "vocab_size", None)
    problems = []
    if found is None:
        message = f"neither the configuration nor the tokenizer of this diffusion model names a mask token ({MASK})"
        problems.append((message, f"add {MASK} to its config.json"))
    elif isinstance(size, int) and not 0 <= found < size:
        problems.append((f"the mask token {found} is none of the model's {size} tokens", f"mend {MASK}"))
    elif found == fill_token(config, tokenizer):
        message = f"the mask token {found} is the token that fills up a sample's last block too, and is never written"
        problems.append((message, f"give {MASK} a token of its own, in its config.json"))
    if fill_token(config, tokenizer) is None:
        message = f"nothing to fill a sample's last block up with: no {' and no '.join(FILL)}"
        problems.append((message, f"add {FILL[0]} to its config.json"))
    return problems


def rounded_up(length: int, block_size: int) -> int:
    """Return the shortest length, in tokens, of whole blocks that holds ``length``."""
    return -(-length // block_size) * block_size


def longer_than_samples(block_size: int, cutoff: int, name: str) -> tuple[str, str]:
    """Return the message and the remedy for blocks, in tokens, that are longer than samples may be by an argument."""
    message = f"blocks of {block_size} tokens are longer than the longest sample ({name} {cutoff})"
    return f"{message}: each is filled up to a block", f"lower it, or raise {name}"


def place_of(config: Any) -> str:
    """Return where a model was found, as the place of what is wrong with it; empty for one that was made by itself."""
    return str(getattr(config, "name_or_path", "") or "")


def _inner(tokenizer: Any) -> Any:
    """Return the tokenizer in a processor, or what was given."""
    return getattr(tokenizer, "tokenizer", None) or tokenizer


def _first(*values: Any) -> int | None:
    """Return the first token among values; several ends of a text count as the first of them."""
    for value in values:
        one = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(one, int) and not isinstance(one, bool):
            return one
    return None
