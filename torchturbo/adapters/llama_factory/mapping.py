"""LLaMA-Factory's arguments as a configuration layer: which of them mean a key of ours, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchturbo.adapters import hf_arguments
from torchturbo.errors import Problem
from torchturbo.logging import get_logger
from torchturbo.objectives.diffusion.models import SHIFTED, longer_than_samples, rounded_up, token_problems

if TYPE_CHECKING:
    from torchturbo.adapters.llama_factory.said import Said
    from torchturbo.engine.config import EngineConfig, FrameworkValue

log = get_logger(__name__)
CHECKPOINTING = hf_arguments.CHECKPOINTING
FREEZE = "freeze_policy"
FREEZE_FLAGS: Mapping[str, str] = {
    "freeze_vision_tower": f"{FREEZE}.vision_tower",
    "freeze_multi_modal_projector": f"{FREEZE}.multi_modal_projector",
    "freeze_language_model": f"{FREEZE}.language_model",
}
"""LLaMA-Factory's switches and our keys of the same meaning. Its own defaults freeze the first two."""

MEANINGS: tuple[tuple[str, str, bool], ...] = (
    ("disable_gradient_checkpointing", f"{CHECKPOINTING}.enabled", True),
    ("use_reentrant_gc", f"{CHECKPOINTING}.use_reentrant", False),
    *((name, path, False) for name, path in FREEZE_FLAGS.items()),
)
"""Switches of LLaMA-Factory's own: (name, our key, whether it means the opposite)."""


def framework_values(said: Mapping[str, Said]) -> tuple[list[FrameworkValue], list[Problem]]:
    """Return the keys that the user set through LLaMA-Factory, and where two of its arguments contradict each other.

    Only what was written counts: a default of LLaMA-Factory's or of TrainingArguments says nothing.
    """
    from torchturbo.engine.config import FrameworkValue

    plain = {name: one.value for name, one in said.items()}
    values = [
        value._replace(place=placed(value.place, said))
        for value in hf_arguments.framework_values(plain, typed=True)
        if value.path != hf_arguments.PRECISION or isinstance(switch(said, "bf16"), bool)
    ]
    for name, path, opposite in MEANINGS:
        on = switch(said, name)
        if on is not None:
            values.append(FrameworkValue(path, on != opposite, said[name].place))
    kept: dict[str, FrameworkValue] = {}
    problems = []
    for value in values:
        other = kept.setdefault(value.path, value)
        if other.value != value.value:
            problems.append(Problem(value.place, "", f"contradicts {other.place}", "keep one of them"))
    return list(kept.values()), problems


def placed(place: str, said: Mapping[str, Said]) -> str:
    """Return where an argument stands that Transformers' part of the checks names as ``--name``."""
    one = said.get(place.removeprefix("--"))
    return one.place if one is not None else place


def switch(said: Mapping[str, Said], name: str) -> bool | None:
    """Return what the user set a switch to; None where nobody did, or with a value that is neither."""
    value = said[name].value if name in said else None
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return None


def frozen_parts(config: Any) -> dict[str, bool]:
    """Return LLaMA-Factory's freeze switches, by name, that follow from a configuration.

    A layer of TorchTurbo's that sets one part of ``freeze_policy`` owns all three. What nobody set stays with
    LLaMA-Factory's defaults and is missing here.
    """
    from torchturbo.config.layers import Layer

    layers = {name: config.origin(path).layer for name, path in FREEZE_FLAGS.items()}
    owned = any(layer > Layer.FRAMEWORK for layer in layers.values())
    return {
        name: bool(config.get(path)) for name, path in FREEZE_FLAGS.items() if owned or layers[name] > Layer.DEFAULT
    }


BLOCK = "diffusion.bd_block_size"
FLASH = ("fa2", "fa3")
"""What LLaMA-Factory calls FlashAttention in ``flash_attn``."""


def round_up_cutoff(data: Any, config: EngineConfig, said: Mapping[str, Said]) -> None:
    """Let LLaMA-Factory cut the samples of a diffusion model to whole blocks; the log says so.

    Where it packs, it takes one off the length that it was told, and puts one back with the padding of each row.
    """
    block, one = config.diffusion.bd_block_size, said.get("cutoff_len")
    told = getattr(type(data), "cutoff_len", data.cutoff_len) if one is None else int(one.value)
    kept_back = told - data.cutoff_len
    data.cutoff_len = rounded_up(told, block) - kept_back
    if rounded_up(told, block) != told:
        text = "cutoff_len %d (%s) is rounded up to %d: whole blocks of %d tokens (diffusion.bd_block_size)"
        where = "LLaMA-Factory's default" if one is None else one.place
        log.info_rank0(text, told, where, rounded_up(told, block), block)
    if block > told:
        place = config.origin(BLOCK).place
        log.warning_rank0("%s", Problem(place, BLOCK, *longer_than_samples(block, told, "cutoff_len")))


def diffusion_problems(
    model_args: Any, config: Any, tokenizer: Any, said: Mapping[str, Said], outside: Sequence[str] = ()
) -> list[Problem]:
    """Return what keeps LLaMA-Factory from training a diffusion model as it was told to, before weights are read.

    ``outside`` names the arguments that are on by which the loss is made outside the model.
    """
    problems = [
        Problem(placed("--model_name_or_path", said), "", *found) for found in token_problems(config, tokenizer)
    ]
    if str(getattr(model_args, "flash_attn", "")).rpartition(".")[2].lower() in FLASH:
        message = "FlashAttention can't express the mask of block diffusion"
        problems.append(Problem(placed("--flash_attn", said), "", message, "use sdpa, or disabled for eager"))
    problems += accuracy_problems(said)
    return problems + [Problem(said[name].place, "", SHIFTED, "turn it off") for name in outside]


ACCURACY = "compute_accuracy"


def accuracy_problems(said: Mapping[str, Said]) -> list[Problem]:
    """Return a problem where LLaMA-Factory would compare each prediction of a diffusion model with the next label."""
    if not switch(said, ACCURACY):
        return []
    message = "it compares predictions with the next token, and a diffusion model's are of the token itself"
    return [Problem(said[ACCURACY].place, "", message, "turn it off: eval_loss tells how good the model is")]


def in_whole_blocks(knapsack: Callable[..., list[list[int]]], block: Callable[[], int]) -> Callable[..., Any]:
    """Return LLaMA-Factory's choice of the samples of a packed row, for samples that each take whole blocks.

    It is given lengths and answers with lengths, by which the samples are found again. ``block`` is asked when it is
    called, since the model is known by then; 1 is LLaMA-Factory's own choice.
    """

    def choose(lengths: list[int], capacity: int) -> list[list[int]]:
        grain = block()
        if grain == 1:
            return knapsack(lengths, capacity)
        samples: dict[int, list[int]] = {}
        for length in lengths:
            samples.setdefault(rounded_up(length, grain), []).append(length)
        # One token of a row is held back from the capacity.
        rows = knapsack([rounded_up(length, grain) for length in lengths], rounded_up(capacity, grain))
        return [[samples[rounded].pop() for rounded in row] for row in rows]

    return choose
