"""An estimate of activations: one micro-batch runs forward and backward through a model without data, and is watched.

Tensors are fake (``torch._subclasses.FakeTensorMode``): they have shapes, formats and lifetimes, and no memory. The
tracker of ``memory_snapshot_steps`` (:mod:`torchturbo.observe.tracker`) notes when each storage comes and goes, and
the peak of all that is neither parameter nor gradient is the estimate. Recomputation, the loss and its logits, chunked
or not, and the temporaries of backward are in it, since they run. Layers that are alike run once and count as often as
there are. Depths of multi-token prediction run with it, and a diffusion model's sequences are doubled. Not in it: a
mask, a draft's blocks (a plan says so), what a device's kernels allocate for themselves, the exchange buffers of
sequence and expert parallelism, the allocator's gaps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.engine.model import base_model, set_cache
from torchturbo.engine.steps import activation_checkpointing
from torchturbo.objectives import chunked
from torchturbo.objectives.diffusion.models import is_diffusion_model
from torchturbo.objectives.gradient_in_forward import gradient_in_forward_sum
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.mtp.objective import MultiTokenPrediction
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.objectives.normalise import Normaliser
from torchturbo.observe.objectives import trains
from torchturbo.observe.tracker import TensorTracker
from torchturbo.plan.diffusion import DoubledBatch, doubled, mask_dtype

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context

HELD = ("activations", "other")
"""Kinds of the tracker that are neither parameters, gradients nor optimizer state."""
ATTENTION = "turbo_plan"
PATIENCE = 60
"""Seconds after which a micro-batch is given up."""
CHUNK_SIZE = "loss_chunk.chunk_size"


class Estimate(NamedTuple):
    """Bytes of activations at the peak of one micro-batch, or why they can't be told."""

    bytes: int | None
    reason: str = ""


def estimate(model: nn.Module, config: EngineConfig, context: Context, micro_batch: int, length: int) -> Estimate:
    """Return the activations of ``micro_batch`` sequences of ``length`` tokens on one rank.

    Those of a diffusion model are rounded up to whole blocks, and doubled.
    The model is on the meta device, its parameters frozen and in their format as for training. It is used up.
    """
    ranks = context.plan.sp_size
    if is_diffusion_model(model):
        length = doubled(length, config, ranks)
    try:
        return Estimate(_measured(model, config, context, micro_batch, -(-length // ranks)))
    except Exception as error:  # whatever a model's own code does with tensors that hold no data
        return Estimate(None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")


def _measured(model: nn.Module, config: EngineConfig, context: Context, micro_batch: int, length: int) -> int:
    base: Any = base_model(model)
    computes_in_bf16 = config.mixed_precision == "bf16"
    set_cache(model, False)
    model.train()
    activation_checkpointing.apply(model, config, context)
    if config.loss_chunk.enabled:
        chunked.install(base, config.resolved(CHUNK_SIZE))
    dtype = mask_dtype(base, config)
    if getattr(base.config, "_attn_implementation", None) != "eager":
        AttentionInterface.register(ATTENTION, _attend)  # Transformers makes no mask for a name it does not know
        base.config._attn_implementation = ATTENTION
    with FakeTensorMode() as mode, _Shapes():
        _make_fake(model, mode, torch.bfloat16 if computes_in_bf16 and context.sharded else None)
        tracker = _Tracker(model)
        probes = _thin_out(model, tracker)
        rows = torch.zeros(micro_batch, length, dtype=torch.long)
        autocast = computes_in_bf16 and not context.sharded
        batch: Any = _Depths(model, base, config, rows)
        if is_diffusion_model(model):
            batch = DoubledBatch(base, config, micro_batch, length, context.plan.sp_size, dtype)
            tracker._settle([batch.given["attention_mask"]], "parameters")  # a plan counts it apart
        with tracker:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss: Any = _loss(base, batch) if config.loss_chunk.enabled else batch.loss(model)
            if loss.requires_grad:  # else nothing of the model is trained, and a draft beside it is all that is
                loss.backward()
            del loss
        tracker.settle_gradients()
    return _peak(tracker, probes)


def _loss(base: Any, batch: _Depths | DoubledBatch) -> Tensor:
    """Return the chunked loss of a micro-batch: fake tensors can't wait as the logits of a real run do."""
    head: Any = chunked.head_of(base)
    hidden, target = batch.states()
    chunking = head.turbo_chunking
    if not chunking.recomputed:  # asked when the head's weight was a plain one, as a real one is
        loss = gradient_in_forward_sum(hidden, head.weight, head.bias, target, None, (), chunking.size)
    else:
        loss = head.loss(hidden, target)
    if isinstance(batch, DoubledBatch):
        return loss + batch.cap(hidden, chunking.size)
    return loss + sum(batch.losses())


class _Depths:
    """Rows [B, S], and the losses of a model's heads for multi-token prediction; of a model without, none."""

    def __init__(self, model: nn.Module, base: Any, config: EngineConfig, rows: Tensor) -> None:
        self.base, self.rows = base, rows
        heads = extra_heads(base)
        self.weight = 1.0 if heads is not None and trains(heads, config) else 0.0
        self.objective: Any = None
        self.normaliser = Normaliser()
        if isinstance(heads, SerialHeads):
            self.normaliser.install(model, base)
            self.objective = MultiTokenPrediction(model, base, heads)
            self.normaliser.terms = self.objective.terms(self.weight)
            self.normaliser._weights = {term.name: torch.ones(()) for term in self.normaliser.terms}

    def states(self) -> tuple[Tensor, Tensor]:
        """Return what a watched forward of the decoder alone gives, [N, H], and the targets [N]."""
        if self.objective is not None:
            self.objective.taps.batch = {"input_ids": self.rows, "labels": self.rows}
        return self.base.base_model(input_ids=self.rows)[0].flatten(0, 1), self.rows.flatten()

    def losses(self) -> Iterator[Tensor]:
        """Yield the loss of each depth after such a forward."""
        for term in self.normaliser.terms:
            with torch.set_grad_enabled(self.weight != 0):
                value = term.value(None, {"input_ids": self.rows, "labels": self.rows})
            if value is not None and self.weight:
                yield value
        if self.objective is not None:
            self.objective.taps.close()

    def loss(self, model: Any) -> Tensor:
        """Return the loss of a model's own forward, with those of its depths."""
        with self.normaliser.applied() if self.objective is not None else nullcontext():
            loss: Tensor = model(input_ids=self.rows, labels=self.rows).loss
        return loss


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attend by torch's fused attention; without a mask, as whole rows do on every device, unless the model was given one."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


class _Tracker(TensorTracker):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.weights = list(model.parameters())  # before probes hide those of their layers

    def settle_gradients(self) -> None:
        self._settle((weight.grad for weight in self.weights), "gradients")


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers with a shape where fake tensors alone can't.

    How many elements are not zero depends on data: here all, the most there can be. And torch's rule for a grouped
    matrix product wants bf16, while the CPU's kernel takes any format.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deadline = time.monotonic() + PATIENCE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"no end after {PATIENCE} s")  # a layer that goes through its tokens one by one
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
    """Return a tensor of the shape of a grouped product: of rows by matrices [G, K, N], or of rows by rows."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if offs is not None and left.ndim == right.ndim == 2:
        shape = (len(offs), *shape)
    elif left.ndim == right.ndim == 3:
        shape = (len(left), *shape)
    return left.new_empty(shape, dtype=options.get("out_dtype") or left.dtype)


def _make_fake(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Replace a model's tensors on meta by fake ones of the CPU; parameters get a format where one is given."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    known.setdefault(id(tensor), _fake(tensor, dtype))
                    tensors[name] = known[id(tensor)]  # type: ignore[assignment]


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    chosen = dtype if is_parameter and dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty(tensor.shape, dtype=chosen, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made


# ---- layers that are alike ----


class _Probe(nn.Module):
    """Stands around a layer that runs for itself and for those like it, and notes when it does."""

    def __init__(self, layer: nn.Module, tracker: TensorTracker) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, tracker=tracker)
        self.times = 1
        self.forward_from = self.forward_to = 0
        self.backward_to = sys.maxsize  # where nothing before the layer is trained, nothing tells
        self.held = 0
        self.is_tuple = False

    def __getattr__(self, name: str) -> Any:
        """Ask the layer for what models ask their layers for, such as ``attention_type``."""
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        self.forward_from = len(self.tracker.events)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.__dict__.update(backward_to=len(self.tracker.events)))
        output = self.layer(*args, **kwargs)
        self.forward_to = len(self.tracker.events)
        self.is_tuple = isinstance(output, tuple)
        return output


class _Skipped(nn.Module):
    """Stands for a layer that is like an earlier one: hands its input on."""

    def __init__(self, layer: nn.Module, probe: _Probe) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, probe=probe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        return (hidden,) if self.probe.is_tuple else hidden


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _thin_out(model: nn.Module, tracker: TensorTracker) -> list[_Probe]:
    """Let one layer of each kind run; a stack's layers are alike if their parameters and their settings are."""
    probes: dict[tuple[Any, ...], _Probe] = {}
    for unit in find_units(model).layers:
        owner, _, place = unit.name.rpartition(".")
        holder = model.get_submodule(owner)
        kind = (unit.stack, *_signature(unit.module))
        if kind in probes:
            probes[kind].times += 1
            setattr(holder, place, _Skipped(unit.module, probes[kind]))
        else:
            probes[kind] = _Probe(unit.module, tracker)
            setattr(holder, place, probes[kind])
    return list(probes.values())


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    weights = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in layer.named_parameters())
    settings = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | None) and "idx" not in key and not key.startswith("_")
    )
    return type(layer), weights, settings


def _peak(tracker: TensorTracker, probes: list[_Probe]) -> int:
    """Return the most bytes at a time, each probed layer counted as often as there are such.

    In forward each of them holds what the probed one does. What they hold when backward begins they keep until their
    turn; the probed one stands for the first whose turn it is.
    """
    owner: dict[int, _Probe] = {}
    held = most = 0
    for at, event in enumerate(tracker.events):
        if tracker.kinds[event.storage] not in HELD:
            continue
        held += event.change
        if event.change > 0 and event.storage not in owner:
            made_by = next((probe for probe in probes if probe.forward_from <= at < probe.forward_to), None)
            if made_by is not None:
                owner[event.storage] = made_by
        if event.storage in owner and event.phase == "forward":
            owner[event.storage].held += event.change
        others = sum(probe.held * (probe.times - 1) for probe in probes if probe.forward_to <= at < probe.backward_to)
        most = max(most, held + others)
    return most
