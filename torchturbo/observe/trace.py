"""Reads a Chrome trace of a profiler and sums it up: the most expensive operators, as a table.

The table is made from the trace and not from the profiler, because ``torch_npu``'s has no ``key_averages``.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MILLI = 1e3
"""Microseconds, the unit of a trace, in a millisecond."""
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a CUDA device does."""
DEVICE_PROCESS = "Ascend Hardware"
"""Name of the process under which torch_npu's traces show what the device does."""


class Cost(NamedTuple):
    """What the calls of one operator took, in microseconds."""

    name: str
    calls: int
    host: float
    """On the host, without the operators that it called."""
    device: float
    """On the device, by the kernels that it launched."""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, packed or not."""
    text = path.read_bytes()
    trace = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    events: list[dict[str, Any]] = trace["traceEvents"] if isinstance(trace, dict) else trace
    return events


def costs(events: Iterable[Mapping[str, Any]]) -> list[Cost]:
    """Return what each operator took, the most expensive first: by device time where a device worked, else by host time."""
    everything = list(events)
    spans = [event for event in everything if event.get("ph") == "X"]
    operators = [event for event in spans if event.get("cat") == "cpu_op"]
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    for event, own in _own_times(operators):
        calls[event["name"]] += 1
        host[event["name"]] += own
    launched = {event.get("args", {}).get("External id"): event["name"] for event in operators}
    for event in _of_device(everything, spans):
        name = launched.get(event.get("args", {}).get("External id"), event["name"])
        calls.setdefault(name, 0)
        device[name] += float(event["dur"])
    found = [Cost(name, calls[name], host[name], device[name]) for name in calls]
    return sorted(found, key=lambda cost: (cost.device, cost.host), reverse=True)


def _own_times(operators: list[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], float]]:
    """Yield each operator with its time less that of the operators it called, which lie inside it on its thread."""
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in operators:
        threads[event.get("pid"), event.get("tid")].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        own = [float(event["dur"]) for event in thread]
        open_calls: list[int] = []
        for index, event in enumerate(thread):
            while open_calls and _end(thread[open_calls[-1]]) <= float(event["ts"]):
                open_calls.pop()
            if open_calls:
                own[open_calls[-1]] -= float(event["dur"])
            open_calls.append(index)
        yield from zip(thread, own, strict=True)


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _of_device(everything: list[Mapping[str, Any]], spans: list[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    processes = {
        event.get("pid")
        for event in everything
        if event.get("name") == "process_name" and DEVICE_PROCESS in str(event.get("args", {}).get("name"))
    }
    return (event for event in spans if event.get("cat") in DEVICE_EVENTS or event.get("pid") in processes)


def table(found: list[Cost], title: str, rows: int = 10) -> str:
    """Return a table of the most expensive operators, with a share of the whole for each."""
    on_device = any(cost.device for cost in found)
    total = sum(cost.device if on_device else cost.host for cost in found) or 1.0
    shown = found[:rows]
    width = max([len("operator"), *(len(cost.name) for cost in shown)])
    where = "device" if on_device else "host"
    which = f"the {len(shown)} most expensive of {len(found)} operators"
    lines = [
        f"{title}: {which}, {total / MILLI:.2f} ms on the {where} in all",
        f"{'operator':<{width}}  {'calls':>7}  {'host ms':>10}  {'device ms':>10}  {'share':>6}",
    ]
    for cost in shown:
        share = (cost.device if on_device else cost.host) / total
        device = f"{cost.device / MILLI:>10.3f}" if on_device else f"{'-':>10}"
        lines.append(f"{cost.name:<{width}}  {cost.calls:>7}  {cost.host / MILLI:>10.3f}  {device}  {share:>6.1%}")
    return "\n".join(lines) + "\n"
