"""Chunked loss: a model's head and cross-entropy run chunk by chunk in training, and the full logits never exist.

The model's own forward goes on, so auxiliary losses and multi-modal arguments stay what they are. While it trains,
its head returns :class:`DeferredLogits` instead of logits, and the loss function's cross-entropy calls the head's
``loss``. All work with the head's weight is inside that one method, which a sharding backend can register as a forward
method: the weight is then gathered once for all chunks.

Model and head get a class made for them, with their own class as its base and under its name (as FSDP2 does); their
attributes, and so state dicts, copies and pickles, are those of the plain model.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.engine.model import base_model
from torchturbo.objectives.chunk import autocast_format, kept_rows
from torchturbo.objectives.deferred import DeferredLogits, Operation
from torchturbo.objectives.gradient_in_forward import gradient_in_forward_sum
from torchturbo.objectives.recomputed import learned_operands, recomputed_sum


@dataclass
class Chunking:
    """What a model and its head share."""

    size: int
    """Rows of a chunk."""
    active: bool = False
    """Whether a training forward is under way."""
    losses: int = 0
    """Losses that the head has computed in it."""
    trial: bool = False
    """Whether only the way to the loss is of interest: the head then computes nothing."""
    recomputed: bool = False
    """Whether the head was computed a second time for the last loss; before the first, whether its kind tells so."""


class _Installed:
    """Base of the classes made here. What they add is on the class: an instance's own attributes stay as they were."""

    turbo_plain: Any
    """The class before."""
    turbo_chunking: Any
    """Its :class:`Chunking`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the plain class: the made one can't be imported anywhere."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (copyreg._reconstructor, (self.turbo_plain, object, None), *reduced[2:])  # type: ignore[attr-defined]


class ChunkedHead(_Installed):
    """A head whose logits wait, during a training forward, for the loss that is made of them."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the logits [..., V] of hidden states [..., H], deferred while a training forward is under way."""
        if not self.turbo_chunking.active or args or kwargs:
            return super().forward(hidden, *args, **kwargs)  # type: ignore[misc]
        linear: Any = linear_of(self)
        dtype = autocast_format(hidden.device.type) or hidden.dtype
        return DeferredLogits.of(self, hidden, linear.out_features, dtype)

    def loss(
        self, hidden: Tensor, target: Tensor, operations: tuple[Operation, ...] = (), ignore_index: int = -100
    ) -> Tensor:
        """Return the sum of the cross-entropies of hidden states [N, H] against targets [N], a scalar.

        ``operations`` are done to the logits before. The result has at least float32.
        """
        chunking = self.turbo_chunking
        chunking.losses += 1
        if chunking.trial:
            return hidden.new_zeros((), dtype=torch.float32)
        head: Any = self
        target = target.to(hidden.device)
        kept = kept_rows(target, ignore_index)
        chunking.recomputed = needs_recomputing(self, hidden, operations)
        if chunking.recomputed:
            project = super().forward  # type: ignore[misc]
            parameters = list(head.parameters())
            return recomputed_sum(project, parameters, hidden, target, kept, operations, chunking.size)
        return gradient_in_forward_sum(hidden, head.weight, head.bias, target, kept, operations, chunking.size)


class ChunkedModel(_Installed):
    """A model whose training forward leaves the logits to the loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; one that trains on labels returns no logits."""
        model: Any = self
        if not (model.training and torch.is_grad_enabled() and _wants_loss_alone(self.turbo_plain, args, kwargs)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with training_forward(self.turbo_chunking):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self.turbo_chunking.losses:
            message = f"{type(self).__name__} computed its loss past the head that was prepared for a chunked loss"
            raise RuntimeError(f"{message}: do not replace its head, forward or loss function after the engine started")
        return without_logits(output)


@contextmanager
def training_forward(chunking: Chunking) -> Iterator[None]:
    """Let the head defer its logits inside this block."""
    chunking.active, chunking.losses = True, 0
    try:
        yield
    finally:
        chunking.active = False


@contextmanager
def real_logits(model: nn.Module) -> Iterator[None]:
    """Work with a model's head beside its own loss inside this block, also in the midst of its training forward.

    The head returns logits [..., V] there, for a draft head's teacher for instance; and a loss that is computed with
    it, by its ``loss`` too, does not pass for the model's. On a model without chunked loss nothing changes.
    """
    head = head_of(base_model(model))
    if not isinstance(head, ChunkedHead):
        yield
        return
    chunking = head.turbo_chunking
    before = chunking.active, chunking.losses
    chunking.active = False
    try:
        yield
    finally:
        chunking.active, chunking.losses = before


def install(base: nn.Module, size: int) -> None:
    """Let a Transformers model compute its training loss in chunks of ``size`` rows.

    What its forward does must be known to work: :func:`torchturbo.objectives.chunked_check.obstacle`.
    """
    chunking, head = Chunking(size), head_of(base)
    _swap(head, ChunkedHead, chunking)
    _swap(base, ChunkedModel, chunking)
    chunking.recomputed = needs_recomputing(head)  # a weight that is sharded later looks like no plain one outside


def remove(base: nn.Module) -> None:
    """Give a model and its head their own classes back; nothing happens to a model without chunked loss.

    What sharding has put around them since stays, but for the head's ``loss`` if that was registered there.
    """
    for module in (base, head_of(base)):
        if isinstance(module, _Installed):
            module.__class__ = _without(type(module))
            registered = getattr(vars(module).get("loss"), "__wrapped__", None)
            if getattr(registered, "__func__", None) is ChunkedHead.loss:
                del vars(module)["loss"]


def _without(kind: Any) -> Any:
    """Return a class with the plain one in place of ours: FSDP2 makes a class above ours, with it as a base."""
    if "turbo_plain" in vars(kind) or not issubclass(kind, _Installed):
        return vars(kind).get("turbo_plain", kind)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    make: Any = type(kind)
    return make(kind.__name__, tuple(map(_without, kind.__bases__)), own)


def recomputes(model: nn.Module) -> bool:
    """Return whether a model's head is computed a second time in backward, as it was for the last loss.

    Before the first loss the kind of its head tells, which knows nothing of fp16 autocast and learned operations.
    """
    head = head_of(base_model(model))
    return isinstance(head, ChunkedHead) and bool(head.turbo_chunking.recomputed)


def head_of(base: nn.Module) -> Any:
    """Return the module that makes a Transformers model's logits; None where it names none."""
    named: Any = getattr(base, "get_output_embeddings", lambda: None)
    return named()


def linear_of(head: Any) -> nn.Linear | None:
    """Return the linear layer that a head is, or that PEFT has wrapped (LoRA, ``modules_to_save``); None for others."""
    if isinstance(head, nn.Linear):
        return head
    if callable(wrapped := getattr(head, "get_base_layer", None)):
        return linear_of(wrapped())
    original = getattr(head, "original_module", None)
    return None if original is None else linear_of(original)


def needs_recomputing(head: Any, hidden: Tensor | None = None, operations: tuple[Operation, ...] = ()) -> bool:
    """Return whether gradients can't be computed in forward: only for the plain matrix product they are known.

    Not for a subclass of ``nn.Linear`` or a quantised weight; nor where an operation has a parameter of its own; nor
    in fp16, whose range the sums before scaling may leave.
    """
    plain = head.turbo_plain is nn.Linear and type(head.weight) in (nn.Parameter, Tensor)
    learned = bool(learned_operands(operations))
    if not plain or learned:
        return True
    states = head.weight if hidden is None else hidden
    return torch.float16 in (states.dtype, autocast_format(states.device.type))


def without_logits(output: Any) -> Any:
    """Return a model's output, a mapping or a tuple, with None for logits that were never computed."""
    if isinstance(output, Mapping):
        kept = {name: value for name, value in output.items() if not isinstance(value, DeferredLogits)}
        return type(output)(**kept)
    return tuple(None if isinstance(value, DeferredLogits) else value for value in output)


def _wants_loss_alone(plain: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call has labels and asks for no certain logits."""
    given = dict(kwargs)
    if args:
        given |= inspect.signature(plain.forward).bind_partial(None, *args).arguments
    kept = given.get("logits_to_keep")
    return given.get("labels") is not None and (kept is None or (isinstance(kept, int) and kept == 0))


def _swap(module: nn.Module, mixin: Any, chunking: Chunking) -> None:
    plain: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    # Trainers ask a model's forward which columns of the data it takes, and whether it takes loss arguments.
    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    forward.__doc__ = plain.forward.__doc__
    same = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    names = {**same, "forward": forward, "turbo_plain": plain, "turbo_chunking": chunking}
    module.__class__ = type(plain)(plain.__name__, (mixin, plain), names)
