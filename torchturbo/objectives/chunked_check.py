"""Whether a model's loss can be computed in chunks, found before its weights are read.

The model's own forward is run once with its backbone replaced by a stand-in that returns hidden states [1, 2, H], so
only what comes after the backbone runs: slicing, head, whatever is done to the logits, loss. Nothing of it touches a
weight, so a model on the meta device will do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.objectives import chunked
from torchturbo.objectives.deferred import UnknownOperation
from torchturbo.objectives.normalise import own_loss_function

TRIAL_SIZE = 1
"""Chunk size of a trial, in which no chunk is computed."""


def obstacle(base: nn.Module) -> str | None:
    """Return what keeps a Transformers model's training loss from being computed in chunks; None where nothing does."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(base).__name__
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder, expected a causal language model"
    loss = own_loss_function(base)
    if loss is not ForCausalLMLoss:
        found = getattr(loss, "__name__", type(loss).__name__)
        return f"{name} uses the loss {found}, expected Transformers' ForCausalLMLoss"
    head = chunked.head_of(base)
    if head is None:
        return f"{name} has no output embeddings, expected a linear head"
    linear = chunked.linear_of(head)
    if linear is None:
        return f"the head of {name} is a {type(head).__name__}, expected a linear layer"
    try:
        reached = _losses_of_a_trial(base, head, linear)
    except UnknownOperation as error:
        return f"{name} does something to its logits that can't be done in chunks: {error}"
    except Exception as error:
        told = " ".join(str(error).split())[:120]
        return f"what {name} does after its backbone could not be followed: {type(error).__name__}: {told}"
    return None if reached else f"{name} does not compute its loss from its head's logits"


def _losses_of_a_trial(base: nn.Module, head: nn.Module, linear: nn.Linear) -> int:
    """Run a model's forward on a stand-in for its backbone, and return how many losses its head was asked for."""
    device = linear.weight.device
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    known = inspect.signature(base.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "attention_mask" in known:  # some models drop the positions that it masks from their loss
        inputs["attention_mask"] = torch.ones_like(ids)
    if "output_router_logits" in known:
        inputs["output_router_logits"] = False  # the router's loss is made of layers that do not run here
    chunked.install(base, TRIAL_SIZE)
    chunking: chunked.Chunking = base.turbo_chunking  # type: ignore[assignment]
    try:
        with ExitStack() as stack:
            states = torch.zeros((1, 2, linear.in_features), dtype=_format(linear), device=device)
            for module in _backbone(base, head):
                stack.enter_context(_returning(module, StandIn(states)))
            chunking.trial = True
            stack.enter_context(torch.no_grad())
            stack.enter_context(chunked.training_forward(chunking))
            type(base).turbo_plain.forward(base, **inputs)  # type: ignore[attr-defined]
    finally:
        chunked.remove(base)
    return chunking.losses


def _backbone(base: nn.Module, head: nn.Module) -> list[nn.Module]:
    """Return what a forward may call to get hidden states: the children beside the head, and theirs (a decoder)."""
    children = [child for child in base.children() if head not in child.modules()]
    return [*children, *(inner for child in children for inner in child.children())]


def _format(linear: nn.Linear) -> torch.dtype:
    dtype = linear.weight.dtype
    return dtype if dtype.is_floating_point else torch.float32  # quantised weights are packed into integers


@contextmanager
def _returning(module: nn.Module, value: Any) -> Iterator[None]:
    """Let a module return a value instead of running, unless it is called with hidden states: no backbone is."""
    before, own = module.__dict__.get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        between = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return own(*args, **kwargs) if between else value

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


class StandIn:
    """What a backbone returns, as far as a head cares: hidden states, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, at: Any) -> Any:
        parts = (self.last_hidden_state,)
        return parts[at] if at in (0, -1) or isinstance(at, slice) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return one output by its name."""
        return getattr(self, name) if name == "last_hidden_state" else default
