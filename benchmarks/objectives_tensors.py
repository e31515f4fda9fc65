"""What the objectives never hold: every tensor that a step makes is looked at as it is made, backward included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import objectives_steps as steps
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.generated.keys import KEYS

CHUNK = 64
"""Rows of logits at once."""
LENGTH, BLOCK = 4096, 32
"""Tokens of a sequence, and of a block, of the mask that is looked at."""


class Held(NamedTuple):
    """The most of something that was found, and the most that it may be."""

    text: str
    found: int
    limit: int


class Largest(TorchDispatchMode):
    """Keeps the largest measure of the tensors that are made."""

    def __init__(self, measure: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.measure, self.most = measure, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.most = max(self.most, self.measure(leaf))
        return made


def rows_of_logits(tensor: Tensor, vocabulary: int, matrices: set[tuple[int, ...]]) -> int:
    """Return the rows that the memory of a tensor [..., V] has; 0 for one of another shape, or of a weight's.

    A value that is spread over many rows has one row of memory at most.
    """
    logits = tensor.dim() > 0 and tensor.shape[-1] == vocabulary and tuple(tensor.shape) not in matrices
    if not logits or not tensor.is_floating_point():
        return 0
    return tensor.untyped_storage().nbytes() // tensor.element_size() // vocabulary


def draft_logits() -> Held:
    """Return the most rows of logits of any tensor in a step of a model with a draft, chunked loss on."""
    model = steps.make_model("draft")
    keys = {"ops.policy": "native", "mtp.enabled": True, "loss_chunk.enabled": True, "loss_chunk.chunk_size": CHUNK}
    keys["dspark.num_anchors"] = 32
    engine = prepared(model, keys)
    vocabulary = model.config.vocab_size
    # A weight's gradient on its way has its shape, or its transpose's.
    shapes = {tuple(weight.shape) for weight in model.parameters()}
    ids = torch.randint(3, vocabulary, (2, 256), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    with Largest(
        lambda tensor: rows_of_logits(tensor, vocabulary, shapes | {shape[::-1] for shape in shapes})
    ) as found:
        train_step(engine, model, batch)
    return Held(f"DSpark: rows of the largest [rows, V] in a step with chunks of {CHUNK}", found.most, CHUNK)


def diffusion_mask() -> Held:
    """Return the entries of the largest tensor of numbers that flex attention's mask takes to be made."""
    from torchturbo.objectives.diffusion.mask import attention_mask, doubled_rule

    rule = doubled_rule(None, LENGTH, BLOCK)
    with Largest(lambda tensor: tensor.numel() if tensor.is_floating_point() else 0) as found:
        attention_mask("flex_attention", rule, 1, 2 * LENGTH, torch.bfloat16, torch.device("cpu"))
    text = f"block diffusion: entries of the largest float tensor in making flex attention's mask at {LENGTH:,} tokens"
    return Held(text, found.most, (2 * LENGTH) ** 2 - 1)


def prepared(model: Any, keys: dict[str, Any]) -> Engine:
    """Return an engine that has prepared a model as a command line with these keys does."""
    words = [f"{KEYS[path].cli}={str(value).lower()}" for path, value in keys.items()]
    engine = Engine(build_from_args(parse_torchturbo_args(words)[0]), Context())
    engine.prepare(model)
    return engine


def train_step(engine: Engine, model: Any, batch: dict[str, Tensor]) -> None:
    """Run one micro-batch forward and backward."""
    normaliser = engine.context.normaliser
    assert normaliser is not None
    normaliser.open_window([batch], torch.device("cpu"))
    with normaliser.applied():
        model(**batch).loss.backward()
