"""Counts the bytes of live tensors by what they are for: parameters, gradients, activations, optimizer state.

A dispatch mode sees every operator and notes each new storage; a weak reference notes its end. What a storage is for
is settled afterwards, when it is known: a gradient is what a parameter's ``.grad`` holds when the optimizer steps
(so accumulated gradients count once, from their first micro-batch on), optimizer state what the optimizer holds after
it stepped (so does state that its first step makes). The idea of the mode is torch's
``torch.distributed._tools.mem_tracker``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

KINDS = ("parameters", "optimizer state", "gradients", "activations", "other")
"""Parameters include buffers. Activations are what forward passes make, recomputed ones too; other: the batch, and what
backward and the optimizer hold for a moment."""
PHASES = ("forward", "backward", "optimizer")


class Event(NamedTuple):
    """A storage came, went or changed its size."""

    operator: int
    """How many operators had run."""
    step: int
    phase: str
    storage: int
    change: int
    """In bytes."""


class Moment(NamedTuple):
    """What was held at one time."""

    operator: int
    step: int
    phase: str
    bytes: dict[str, int]
    """By kind."""

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.bytes.values())


class TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode: enter it for each optimizer step, leave it after it.

    Parameters
    ----------
    model
        Whose parameters and buffers are known from the start.
    optimizer
        The torch optimizer that steps; None where it is not known.
    step
        Number of the first step; :attr:`step` is set to each further one.

    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, step: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.step = step
        self.operators = 0
        self.events: list[Event] = []
        self.kinds: dict[int, str] = {}
        self._live: dict[int, tuple[int, int, Any]] = {}  # address of a storage -> its number, its bytes, a reference
        self._stepping = False  # from the optimizer's step to the end of the engine's
        self._count = 0
        tensors = [*model.parameters(), *model.buffers()]
        self._settle(tensors, "parameters")
        self._settle((weight.grad for weight in model.parameters()), "gradients")
        self._settle(_state(optimizer), "optimizer state")
        self._handles = [] if optimizer is None else self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> list[Any]:
        def before(*args: Any, **kwargs: Any) -> None:
            self._stepping = True
            self._settle((weight.grad for weight in self.model.parameters()), "gradients")

        def after(*args: Any, **kwargs: Any) -> None:
            self._settle(_state(optimizer), "optimizer state")

        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def __enter__(self) -> Any:
        """Begin a step: its first phase is the forward pass."""
        self._stepping = False
        return super().__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Forget the optimizer and every storage; the events stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._live.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, then look at the storages it took and gave."""
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        kind = self._kind_now()
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self._note(value, "other")  # made elsewhere: a batch, a constant
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._note(value, kind)
        return result

    def _phase(self) -> str:
        if self._stepping:
            return "optimizer"
        return "backward" if torch._C._current_graph_task_id() >= 0 else "forward"

    def _kind_now(self) -> str:
        """Return what a new storage is for: recomputation runs inside backward, but with gradients enabled."""
        phase = self._phase()
        return "activations" if phase == "forward" or (phase == "backward" and torch.is_grad_enabled()) else "other"

    def _note(self, tensor: Tensor, kind: str) -> int | None:
        """Return the number of a tensor's storage, after noting it if it is new or has another size."""
        local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, what this rank holds
        if local.device.type == "meta":
            return None
        storage = local.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._live.get(address)
        if known is None:
            number, self._count = self._count, self._count + 1
            self.kinds[number] = kind
            self._live[address] = number, size, weakref.ref(storage, self._gone(address))
            self._record(number, size)
            return number
        number, before, reference = known
        if size != before:
            self._live[address] = number, size, reference
            self._record(number, size - before)
        return number

    def _gone(self, address: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            number, size, _ = self._live.pop(address, (None, 0, None))
            if number is not None:
                self._record(number, -size)

        return forget

    def _record(self, number: int, change: int) -> None:
        self.events.append(Event(self.operators, self.step, self._phase(), number, change))

    def _settle(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        for tensor in tensors:
            if tensor is not None and (number := self._note(tensor, kind)) is not None:
                self.kinds[number] = kind

    def moments(self) -> Iterator[Moment]:
        """Yield what was held after each event, in order."""
        held: dict[str, int] = dict.fromkeys(KINDS, 0)
        for event in self.events:
            held[self.kinds[event.storage]] += event.change
            yield Moment(event.operator, event.step, event.phase, dict(held))


def _state(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    if optimizer is not None:
        yield from (value for value in tree_iter(list(optimizer.state.values())) if isinstance(value, Tensor))


class Summary(NamedTuple):
    """What :meth:`TensorTracker.moments` came to."""

    peak: Moment
    peaks: dict[int, Moment]
    """Of each step."""
    timeline: list[Moment]
    """In order; of each stretch the moment with the most bytes."""


def summarised(tracker: TensorTracker, points: int) -> Summary | None:
    """Return the peaks and a timeline of about ``points`` moments; None where no tensor was seen."""
    stretch = max(1, -(-len(tracker.events) // points))
    timeline: list[Moment] = []
    peaks: dict[int, Moment] = {}
    for at, moment in enumerate(tracker.moments()):
        peaks[moment.step] = max(peaks.get(moment.step, moment), moment, key=_total)
        if at % stretch == 0:
            timeline.append(moment)
        timeline[-1] = max(timeline[-1], moment, key=_total)
    return Summary(max(peaks.values(), key=_total), peaks, timeline) if peaks else None


def _total(moment: Moment) -> int:
    return moment.total
