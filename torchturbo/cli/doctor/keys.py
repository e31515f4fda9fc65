"""What each key would do on this machine: its own text, or a sentence where the device decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torchturbo.cli.doctor.device import Device
from torchturbo.generated.keys import KEYS


def effects(device: Device | None) -> dict[str, str]:
    """Return a sentence for every key, in the contract's order; without a device the keys' own texts."""
    return {path: _effect(path, device) for path in KEYS}


def _effect(path: str, device: Device | None) -> str:
    if device is not None and path in HERE:
        return HERE[path](device)
    return KEYS[path].text.partition(". ")[0].rstrip(".")


def _mixed_precision(device: Device) -> str:
    return {
        "fast": "Runs in bf16 and in fp32, both at the hardware's speed",
        "emulated": "Runs in fp32, and slowly in bf16: this processor has no instruction for it",
        "none": "Runs in fp32 alone: bf16 is refused, the device does not compute in it",
    }[device.bf16]


def _determinism(device: Device) -> str:
    if not device.deterministic:
        return "Sets torch's strict mode; the device needs no variable for it"
    variables = ", ".join(
        f"{name} (already set, kept)" if name in os.environ else f"{name}={value}"
        for name, value in device.deterministic.items()
    )
    return f"Sets torch's strict mode, and {variables}"


def _backend(device: Device) -> str:
    return f"Shards the model over several ranks by FSDP2, over {device.backend}; one process is not sharded"


def _ops(device: Device) -> str:
    taken = [f"{item.op} {item.chosen}" for item in device.operators if item.chosen != "native"]
    return f"Takes {', '.join(taken)}; all else is native" if taken else "Leaves every operator native"


def _profiling(device: Device) -> str:
    return f"Writes one trace a rank of the second step, with {' and '.join(device.activities)} activities"


def _snapshot(device: Device) -> str:
    if device.records_memory:
        return "Writes the allocator's own history, for https://pytorch.org/memory_viz"
    return "Counts tensors by kind; a table and a picture, since this allocator keeps no history"


HERE: Mapping[str, Callable[[Device], str]] = {
    "backend": _backend,
    "mixed_precision": _mixed_precision,
    "use_deterministic_algorithms": _determinism,
    "ops.policy": _ops,
    "mfu.enabled": lambda device: device.mfu[0].upper() + device.mfu[1:],
    "profiling": _profiling,
    "memory_snapshot_steps": _snapshot,
}
"""The keys whose effect depends on the device."""
