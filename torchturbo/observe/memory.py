"""Observer: the memory history of the first optimizer steps of a launch.

CUDA and NPU record it themselves, with the stack of every allocation, as a snapshot for https://pytorch.org/memory_viz.
The CPU's allocator does not; there the tensors are counted (:mod:`torchturbo.observe.tracker`), into a JSON file and a
picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchturbo.checkpoint.files import write_text, write_with
from torchturbo.logging import get_logger
from torchturbo.observe.clock import not_training
from torchturbo.observe.profile import PROFILED
from torchturbo.observe.size import size
from torchturbo.observe.tracker import KINDS, Moment, Summary, TensorTracker, summarised
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Run

FOLDER = "memory_snapshot"
"""Where snapshots go, inside the output folder."""
ENTRIES = 1_000_000
"""Allocations and frees that a device keeps, the newest; a step of a large model has some 100,000."""
POINTS = 1500
"""Moments of the timeline in the JSON file: as many as a picture can show."""
BOTH = (
    "the profile of step %d includes the memory snapshot's count of tensors, which is slow on this device: profile in "
    "another launch"
)
log = get_logger(__name__)


def from_config(config: EngineConfig) -> Plugin | None:
    """Return the recorder where the launch asks for it."""
    steps = config.runtime.memory_snapshot_steps
    return MemorySnapshot(steps, config.runtime.profiling) if steps is not None else None


class MemorySnapshot(Plugin):
    """Records from the beginning of the first step to the end of the last one asked for, or to the end of the run.

    Files are written once the step is over for every other observer too: when the loop leaves training, or before the
    next step. A profile of the same step has none of that in it.
    """

    name = "memory snapshot"

    def __init__(self, steps: int, profiling: bool = False) -> None:
        super().__init__()
        self.steps = steps
        self.profiling = profiling
        self.first = 0
        self.finished = 0
        self._recording = False
        self._done = False
        self._optimizer: Optimizer | None = None
        self._tracker: TensorTracker | None = None
        self._entered = False

    def optimizer_built(self, optimizer: Optimizer, run: Run) -> None:
        """Keep it: the CPU's count asks it for its state."""
        self._optimizer = optimizer

    def step_begin(self, micro_batches: Sequence[Mapping[str, Any]], run: Run) -> None:
        """Start to record, or go on; write, where all is recorded."""
        self._write_if_finished(run)
        if self._done:
            return
        if not self._recording:
            self._recording, self.first = True, run.step + 1
            if run.runtime.records_memory:
                run.runtime.record_memory(ENTRIES)
            else:
                self._tracker = TensorTracker(run.model, self._optimizer, self.first)
                if self.profiling and self.steps >= PROFILED:
                    log.warning_rank0(BOTH, PROFILED)
        if self._tracker is not None:
            self._tracker.step = run.step + 1
            self._tracker.__enter__()
            self._entered = True

    def step_end(self, run: Run) -> None:
        """Count the step."""
        if self._recording and not self._done:
            self._leave()
            self.finished += 1
            if self.finished == self.steps:
                run.runtime.synchronize()  # the step's work is training; writing what it allocated is not

    def paused(self, run: Run) -> None:
        """Write, where all is recorded: what evaluating and saving allocate is no part of it."""
        self._write_if_finished(run)

    def end(self, run: Run) -> None:
        """Write what there is where the run was shorter, or failed: running out of memory is when it is wanted."""
        self._leave()
        self._write_if_finished(run)
        if self._done:
            return
        text = "memory snapshot: %d steps were asked for, the run had %d"
        log.warning_rank0(text, self.steps, self.finished)
        if self._recording:
            self._write(run)

    def _leave(self) -> None:
        if self._entered and self._tracker is not None:
            self._tracker.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._entered = False

    def _write_if_finished(self, run: Run) -> None:
        if self._recording and not self._done and self.finished == self.steps:
            self._write(run)

    def _write(self, run: Run) -> None:
        self._done = True
        with not_training():
            self._write_files(run)

    def _write_files(self, run: Run) -> None:
        last = max(self.first, self.first + self.finished - 1)
        steps = f"step_{self.first}" if last == self.first else f"steps_{self.first}-{last}"
        folder = run.output_dir / FOLDER
        path = folder / f"{steps}_rank_{run.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._tracker is not None:
                self._write_count(path, run, self._tracker)
            else:
                run.runtime.synchronize()
                write_with(path.with_suffix(".pickle"), run.runtime.dump_memory)
                log.info_rank0("memory snapshot: %s.pickle (open it in https://pytorch.org/memory_viz)", path)
        except (OSError, RuntimeError) as error:  # a snapshot is no reason to lose the run
            log.warning("%s could not be written: %s", path, getattr(error, "strerror", None) or error)
        finally:
            if self._tracker is not None:
                self._tracker.close()
            else:
                run.runtime.record_memory(None)

    def _write_count(self, path: Path, run: Run, tracker: TensorTracker) -> None:
        from torchturbo.observe.memory_picture import draw

        summary = summarised(tracker, POINTS)
        if summary is None:
            return
        write_text(path.with_suffix(".json"), json.dumps(_document(run, summary), indent=1) + "\n")
        title = f"Memory by kind of tensor, rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        picture = draw(summary, path.with_suffix(".png"), title or "Memory by kind of tensor")
        named = path.with_suffix(".json").name + (f" and {picture.name}" if picture else "")
        log.info_rank0("memory: peak %s (%s)", _words(summary.peak), path.parent / named)


def _document(run: Run, summary: Summary) -> dict[str, Any]:
    """Return what the JSON file holds; all figures are bytes."""
    return {
        "what": "bytes of live tensors, by kind; not what libraries or the allocator hold besides",
        "device": run.runtime.device_name(),
        "rank": run.rank,
        "steps": sorted(summary.peaks),
        "peak": _entry(summary.peak),
        "peak_of_each_step": [_entry(summary.peaks[step]) for step in sorted(summary.peaks)],
        "process_peak": run.runtime.peak_memory(),
        "timeline": {
            "operator": [moment.operator for moment in summary.timeline],
            "step": [moment.step for moment in summary.timeline],
            "phase": [moment.phase for moment in summary.timeline],
            **{kind: [moment.bytes[kind] for moment in summary.timeline] for kind in KINDS},
        },
    }


def _entry(moment: Moment) -> dict[str, Any]:
    return {"total": moment.total, "step": moment.step, "phase": moment.phase, "by_kind": moment.bytes}


def _words(moment: Moment) -> str:
    parts = ", ".join(f"{kind} {size(moment.bytes[kind])}" for kind in KINDS)
    return f"{size(moment.total)} in step {moment.step}, {moment.phase}: {parts}"
