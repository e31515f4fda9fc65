"""The places of Trainer's loop at which plugins are called: the optimizer, the steps, the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_callback import TrainerCallback

from torchturbo.engine.backends.fsdp2.offload import offloaded
from torchturbo.engine.hooks import PluginError, name_of

if TYPE_CHECKING:
    from torchturbo.engine.engine import Engine


class PlacesMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does at the places of the loop."""

    turbo: Engine

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        state: Any

    _shown_optimizer: Any = None
    _logged_step: int = 0
    _step_begins: bool = False

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, offload its state, and show it to the plugins before its schedule is made."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        # That of an earlier train() comes back wrapped.
        bare = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if bare is not self._shown_optimizer:
            self._shown_optimizer = offloaded(bare, self.turbo.config, self.turbo.context.runtime)
            self.turbo.context.hooks.call("optimizer_built", bare)
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the micro-batches of an optimizer step: where it begins."""
        self._step_begins = True
        micro_batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._tell_step_begins(micro_batches)
        self._step_begins = False
        return micro_batches, count

    def _tell_step_begins(self, micro_batches: list[Any]) -> None:
        """Call the plugins once a step, before its tokens are counted: they may change the batches.

        A dataset that does not know its length ends with a window without a batch, which is no step on any rank.
        """
        if not (self._step_begins and micro_batches):
            return
        self._step_begins = False
        hooks, count = self.turbo.context.hooks, len(micro_batches)
        for plugin in hooks.plugins:
            hooks.call_one(plugin, "step_begin", micro_batches)
            if len(micro_batches) != count:  # Trainer has planned the accumulation, and the ranks agree on it
                message = f"made {len(micro_batches)} micro-batches of {count}; change batches, not their number"
                raise PluginError(f"plugin {name_of(plugin)}: step_begin: {message}")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; what plugins and loss terms have to say stands beside the training loss, for every logger alike."""
        context = self.turbo.context
        if "loss" in logs and context.hooks.run is not None:
            steps = self.state.global_step - self._logged_step
            self._logged_step = self.state.global_step
            if context.normaliser is not None:
                logs |= context.normaliser.term_metrics(steps, self.args.device)
            context.hooks.call("log", logs)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class LoopCallback(TrainerCallback):  # type: ignore[misc]
    """The places of the loop for which Trainer has no method: where it begins, and the end of an optimizer step."""

    def __init__(self, trainer: PlacesMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        context = self.trainer.turbo.context
        self.trainer._logged_step = state.global_step
        if context.normaliser is not None:
            context.normaliser.forget_terms()
        if context.hooks.run is not None:
            context.hooks.run.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hooks = self.trainer.turbo.context.hooks
        if hooks.run is not None:
            hooks.run.step = state.global_step
            hooks.call("step_end")
