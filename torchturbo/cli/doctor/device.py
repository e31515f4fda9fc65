"""The device that a run here would compute on, and what its operators would be. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchturbo.observe.peaks import choose
from torchturbo.ops.registry import IMPLEMENTATIONS, NATIVE, OPS

if TYPE_CHECKING:
    from torchturbo.ops.registry import Implementation
    from torchturbo.runtime import Runtime


class Operator(NamedTuple):
    """What an operator would get here."""

    op: str
    chosen: str
    """What ``auto`` takes."""
    others: tuple[tuple[str, str], ...]
    """Each better or other implementation, and why it is not taken."""


class Device(NamedTuple):
    """What the engine knows of the device."""

    type: str
    name: str
    number: int
    """How many of them this process sees."""
    memory: int | None
    """Bytes of one device."""
    backend: str
    """torch.distributed's backend."""
    bf16: str
    """``fast``, ``emulated`` or ``none``."""
    mfu: str
    """What MFU is measured against, or why there is none."""
    deterministic: dict[str, str]
    """Variables that deterministic algorithms set."""
    activities: tuple[str, ...]
    """What a profile records."""
    records_memory: bool
    operators: tuple[Operator, ...]


def current_device() -> Device:
    """Return the device that a run without further options takes."""
    from torchturbo.runtime import current_runtime

    runtime = current_runtime()
    name = runtime.device_name()
    return Device(
        type=runtime.device_type,
        name=name,
        number=runtime.device_count(),
        memory=runtime.total_memory(),
        backend=runtime.distributed_backend,
        bf16=_bf16(runtime),
        mfu=choose(None, name, runtime.default_card).why,
        deterministic=runtime.deterministic_environment(),
        activities=runtime.profiler_activities(),
        records_memory=runtime.records_memory,
        operators=tuple(operator(op, runtime) for op in OPS),
    )


def _bf16(runtime: Runtime) -> str:
    if not runtime.supports_bf16():
        return "none"
    return "emulated" if runtime.emulates_bf16() else "fast"


def operator(op: str, runtime: Runtime) -> Operator:
    """Return what ``ops.policy: auto`` gives an operator here, as far as no model is needed to tell."""
    rows = [row for row in IMPLEMENTATIONS if row.op == op]
    reasons = [(row, _reason(row, runtime)) for row in rows]
    chosen = next(row for row, reason in reasons if reason is None)
    others = tuple((row.name, reason) for row, reason in reasons if reason is not None and _concerns(row, runtime))
    return Operator(op, chosen.name, others)


def _reason(row: Implementation, runtime: Runtime) -> str | None:
    refusal = row.refusal(runtime)
    return refusal if refusal is not None or row.name == NATIVE else row.held_back or None


def _concerns(row: Implementation, runtime: Runtime) -> bool:
    """Return whether an implementation is for this kind of device at all."""
    return runtime.device_type in row.devices
