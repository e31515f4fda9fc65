"""Observer: profiles the second optimizer step of a launch, one trace a rank, and the ten most expensive operators.

The first step pays for what happens once (allocations, kernels that are compiled or chosen); the second is the first
that is like all others.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from torchturbo.checkpoint.files import write_text, write_with
from torchturbo.logging import get_logger
from torchturbo.observe.clock import not_training
from torchturbo.observe.trace import costs, read, table
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Run
    from torchturbo.runtime.base import Profiler

FOLDER = "profiling"
"""Where traces go, inside the output folder."""
PROFILED = 2
"""The step that is profiled, counted from the start of this launch."""
log = get_logger(__name__)


def from_config(config: EngineConfig) -> Plugin | None:
    """Return the profiler where the launch asks for it."""
    return StepProfiler() if config.runtime.profiling else None


class StepProfiler(Plugin):
    """Records from the beginning of the second step to its end."""

    name = "profiling"

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self._profiler: Profiler | None = None
        self._mark: Any = None

    def step_begin(self, micro_batches: Sequence[Mapping[str, Any]], run: Run) -> None:
        """Start with the second step."""
        self.begun += 1
        if self.begun == PROFILED and _profiler_enabled():
            # torch has one profiler a process, and a second one would end the first without a word.
            log.warning_rank0("no profile: another profiler is recording this process")
        elif self.begun == PROFILED:
            run.runtime.synchronize()  # what the step before left behind is not this step's
            with not_training():
                self._profiler = run.runtime.profiler()
                self._profiler.start()
            self._mark = record_function(f"optimizer step {run.step + 1}")
            self._mark.__enter__()

    def step_end(self, run: Run) -> None:
        """Stop, and write what was recorded."""
        if (profiler := self._stopped(run)) is not None:
            with not_training():
                self._write(profiler, run)

    def _write(self, profiler: Profiler, run: Run) -> None:
        folder = run.output_dir / FOLDER
        path = folder / f"step_{run.step}_rank_{run.rank}.pt.trace.json.gz"  # TensorBoard looks for .pt.trace.json
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_with(path, lambda temporary: _export(profiler, temporary))
            if run.rank == 0:
                self._summarise(path, run)
        except (OSError, RuntimeError, ValueError) as error:  # a trace is no reason to lose the run
            log.warning("%s could not be written: %s", path, getattr(error, "strerror", None) or error)

    def end(self, run: Run) -> None:
        """Say that there is no trace where there was no second step."""
        if self._stopped(run) is not None:
            log.warning_rank0("no profile: the run ended inside its second optimizer step")
        elif self.begun < PROFILED and run.error is None:
            text = "no profile: the run had %d of the two optimizer steps that it takes; train for longer"
            log.warning_rank0(text, self.begun)

    def _stopped(self, run: Run) -> Profiler | None:
        """Stop the profiler and return it; None if none is running."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        run.runtime.synchronize()
        self._mark.__exit__(None, None, None)
        with not_training():
            profiler.stop()
        return profiler

    def _summarise(self, path: Path, run: Run) -> None:
        text = table(costs(read(path)), f"optimizer step {run.step}, rank {run.rank}")
        write_text(path.with_name(f"step_{run.step}_operators.txt"), text)
        log.info_rank0("profile: %s (open it in https://ui.perfetto.dev)\n%s", path, text.rstrip())


def _export(profiler: Profiler, path: Path) -> None:
    """Write a trace, packed; the profiler itself writes plain JSON on every device."""
    plain = path.with_suffix(".json")
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.is_file():  # Kineto tells nobody
            raise OSError("the profiler did not write its trace; is there space left?")
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as packed:
            shutil.copyfileobj(source, packed)
    finally:
        plain.unlink(missing_ok=True)
        plain.with_name(f"{plain.name}.tmp").unlink(missing_ok=True)  # Kineto's own, where it could not finish
