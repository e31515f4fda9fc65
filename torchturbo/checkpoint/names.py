"""What a model's parameters are called in a checkpoint, and which of a model's tensors belong into one."""

from __future__ import annotations

import sys

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and torch's checkpoint wrapper put into names; DCP's own state dicts go without, too."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers that a checkpoint holds, by name; a tied weight once, under its first name.

    Of a PEFT model that is what its adapters consist of: the base model's frozen weights are in its own folder.
    """
    first = {bare(name) for name, _ in model.named_parameters()} | {bare(name) for name, _ in model.named_buffers()}
    if (adapters := _adapter_names(model)) is not None:
        first &= adapters
    found = {name: value for name, value in get_model_state_dict(model).items() if name in first}
    if wrong := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{wrong[0]} is no tensor, which can't be saved")
    return found  # type: ignore[return-value]


def _adapter_names(model: nn.Module) -> set[str] | None:
    peft = sys.modules.get("peft")  # a model that was made by it has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    prefix = getattr(model.base_model, "prefix", None) or "\0"  # "lora_"; prompt tuning has none
    return {bare(name) for name, parameter in model.named_parameters() if parameter.requires_grad or prefix in name} | {
        bare(name) for name, _ in model.named_buffers() if prefix in name
    }


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter, as a state dict has it."""
    return {parameter: bare(name) for name, parameter in model.named_parameters()}


def bare(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
