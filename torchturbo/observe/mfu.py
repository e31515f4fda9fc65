"""The meter: tokens a second and flops utilisation (MFU, HFU), logged beside the training loss.

Definitions, with the peak of ``observe.peaks`` times the number of devices as the denominator: ``mfu`` is the flops
that training needs, full mask, a second; ``mfu_causal`` the same with the pairs that the mask lets through alone;
``hfu`` adds what is recomputed. All three are fractions. MFU: https://arxiv.org/abs/2204.02311, section 4.1 and
appendix B; HFU: https://arxiv.org/abs/2205.05198, section 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchturbo.logging import get_logger
from torchturbo.observe.clock import Clock
from torchturbo.observe.flops import Beside, Flops, Span
from torchturbo.observe.matmuls import Uncountable
from torchturbo.observe.objectives import Sizes, count, sizes
from torchturbo.observe.peaks import Peak, choose
from torchturbo.observe.tokens import doubled, drafted, tally
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Run

TERA = 1e12
BESIDE = 4
"""Counts of a batch beside its tokens, their squared lengths and the pairs of each span."""
log = get_logger(__name__)


def from_config(config: EngineConfig) -> Plugin | None:
    """Return the meter where the configuration asks for it."""
    return Meter(config.mfu.card) if config.mfu.enabled else None


class Meter(Plugin):
    """Counts the tokens of each step, and says at each log how fast they went by."""

    name = "mfu"

    def __init__(self, card: str | None = None) -> None:
        super().__init__()
        self.card = card
        self.clock = Clock()
        self.peak: Peak | None = None
        self.flops: Flops | None = None
        self._forget()

    def _forget(self) -> None:
        self._ready = False
        self._sizes = Sizes()
        self._counted_loss = False
        self._total: Tensor | None = None  # of the finished steps since the last log, over all ranks
        self._step: Tensor | None = None

    def step_begin(self, micro_batches: Sequence[Mapping[str, Any]], run: Run) -> None:
        """Count this rank's micro-batches and sum over the ranks: one small collective, which every rank calls."""
        if not self._ready:
            self._prepare(run)
        self.clock.start()
        step = torch.zeros(len(self._spans) + 2 + BESIDE, dtype=torch.int64, device=run.runtime.device_type)
        for batch in micro_batches:
            if (counts := self._counted(batch)) is not None:
                step += counts.to(step.device)
        if run.world_size > 1:
            dist.all_reduce(step)
        self._step = step // run.config.parallel_plan.sp_size  # a sequence-parallel group's ranks count the same rows

    @property
    def _spans(self) -> tuple[Span, ...]:
        return self.flops.spans if self.flops is not None else ()

    def _counted(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return tokens, squared lengths, pairs of each span, targets, and a draft's slots and their two kinds of pairs."""
        sizes = self._sizes
        if sizes.block:
            found = doubled(batch, self._spans, sizes.block)
        elif (found := tally(batch, self._spans)) is not None:
            found = torch.cat([found, found[:1]])
        if found is None:
            return None
        slots = drafted(batch, sizes.anchors, sizes.slots) if sizes.anchors else None
        return torch.cat([found, found.new_zeros(3) if slots is None else slots])

    def step_end(self, run: Run) -> None:
        """Add a finished step."""
        if self._step is not None:
            self._total = self._step if self._total is None else self._total + self._step
            self._step = None
        if self.flops is not None and not self._counted_loss:
            self._counted_loss = True
            self.flops = count(
                run.model, run.config
            )  # a chunked loss knows once it has run whether it computes the head again

    def paused(self, run: Run) -> None:
        """Evaluating and saving are no training."""
        self.clock.pause()

    def resumed(self, run: Run) -> None:
        """Training goes on."""
        self.clock.resume()

    def end(self, run: Run) -> None:
        """Forget this run: a Trainer can train again, later and with a model that has been changed."""
        self.clock.stop()
        self._forget()

    def log(self, metrics: dict[str, float], run: Run) -> None:
        """Add the figures since the last log."""
        if self._total is None:
            return
        # Waits for the device, so the time below is the whole time.
        tokens, squared, *pairs, targets, slots, slot_squared, slot_pairs = self._total.tolist()
        self._total = None
        seconds = self.clock.lap()
        if seconds <= 0:
            return
        metrics["tokens_per_second"] = tokens / seconds
        if self.flops is None or self.peak is None:
            return
        computed = 2 * targets if self._sizes.block else tokens
        beside = Beside(targets, slots, slot_squared, slot_pairs)
        possible = self.peak.tflops * TERA * run.world_size * seconds
        metrics["mfu"] = self.flops.model(computed, squared, beside) / possible
        by_span = dict(zip(self.flops.spans, pairs, strict=True))
        metrics["mfu_causal"] = self.flops.causal(computed, by_span, beside) / possible
        metrics["hfu"] = self.flops.hardware(computed, squared, beside) / possible

    def _prepare(self, run: Run) -> None:
        """Choose the peak and count the model, which is as it will be trained by now; say once what that rests on."""
        self._ready = True
        self._sizes = sizes(run.model, run.config)
        runtime = run.runtime
        choice = choose(self.card, runtime.device_name(), runtime.default_card)
        if choice.peak is None:
            log.info_rank0("%s", choice.why)
            return
        try:
            flops = count(run.model, run.config)
        except Uncountable as reason:
            log.warning_rank0("no MFU: %s; tokens/s are logged", reason)
            return
        (log.warning_rank0 if choice.assumed else log.info_rank0)("%s", choice.why)
        if flops.left_out:
            log.warning_rank0("MFU counts the language model alone, without %s", flops.left_out)
        self.peak, self.flops = choice.peak, flops
