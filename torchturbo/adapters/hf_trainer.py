"""The engine under Hugging Face's Trainer: :class:`TurboTrainer`, and :func:`turbo` for any subclass of Trainer.

Both read :func:`torchturbo.engine.args.get_torchturbo_args`, or a configuration given as ``turbo_config``. Methods of
Trainer that are overridden exist in transformers 5.6 and 5.24; tests/adapters holds their signatures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import find_batch_size
from transformers import Trainer

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import (
    clashes,
    compile_clash,
    framework_values,
    idle_for_fsdp2,
    loss_clash,
    place,
    said_values,
    taken_over,
    term_clashes,
)
from torchturbo.adapters.hf_checkpoints import CheckpointMixin
from torchturbo.adapters.hf_data import DataMixin, sequence_clashes
from torchturbo.adapters.hf_diffusion import DiffusionMixin
from torchturbo.adapters.hf_distributed import DistributedMixin
from torchturbo.adapters.hf_optimizer import OptimizerMixin, shard_clashes
from torchturbo.adapters.hf_places import LoopCallback, PlacesMixin
from torchturbo.config.keys import shown
from torchturbo.engine import pipeline
from torchturbo.engine.args import get_torchturbo_args
from torchturbo.engine.config import merge_args
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.engine.shard_check import weightless
from torchturbo.errors import Problem, fail
from torchturbo.logging import get_logger
from torchturbo.models import register
from torchturbo.objectives.diffusion.noise import EVALUATION
from torchturbo.objectives.normalise import IGNORE_INDEX, TokenMean
from torchturbo.parallel.batch import BatchPlan
from torchturbo.plugins.contract import Plugin, Run
from torchturbo.plugins.load import equal_names, load_plugins
from torchturbo.runtime import current_runtime

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchturbo.checkpoint.weights import WeightSource
    from torchturbo.engine.config import EngineConfig
    from torchturbo.runtime import Runtime

register()
log = get_logger(__name__)


class TurboMixin(PlacesMixin, OptimizerMixin, DiffusionMixin, DataMixin, DistributedMixin, CheckpointMixin):
    """Puts the engine under the Trainer class that follows it in the method order.

    Parameters, beside those of that class
    --------------------------------------
    turbo_config
        The configuration; without one the process-wide arguments are read.
    turbo_plugins
        Plugins made in code, which follow those that the configuration names.
    turbo_loaded
        The plugins that the configuration names, where the caller has loaded them already.
    turbo_weights
        Where the weights are of a model that is made on the meta device; each rank then reads its own share of them.

    """

    turbo: Engine
    """The engine, from the first line of Trainer's constructor on."""
    turbo_plan: BatchPlan
    """What one optimizer step consists of."""
    turbo_announces: bool = True
    """Whether the start sets the log level and says what is in force; a program that does so itself turns it off."""
    turbo_framework: str = "hf_trainer"
    """The framework whose plugins are activated, one of :data:`torchturbo.plugins.contract.FRAMEWORKS`."""

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        state: Any
        compute_loss_func: Any
        label_smoother: Any
        accelerator: Any
        add_callback: Any

    def __init__(
        self,
        *args: Any,
        turbo_config: EngineConfig | None = None,
        turbo_plugins: Sequence[Plugin] = (),
        turbo_loaded: Sequence[Plugin] | None = None,
        turbo_weights: WeightSource | None = None,
        **kwargs: Any,
    ) -> None:
        self._turbo_config = turbo_config
        self._weights = turbo_weights
        self._given_plugins = turbo_plugins
        self._loaded_plugins = turbo_loaded
        try:
            super().__init__(*args, **kwargs)
            self._settle_loss_owner()
            self._settle_diffusion()
        except BaseException as error:  # a run that can't be set up is over for its plugins too
            if hasattr(self, "turbo"):
                self.turbo.context.hooks.give_up(error)
            raise
        self.add_callback(LoopCallback(self))

    # Trainer's constructor calls this first, with `self.args` and `self.model` set and nothing derived from them yet.
    # It is the one place that any subclass passes, whatever arguments its own constructor has.
    def create_accelerator_and_postprocess(self) -> None:
        """Start the engine, then let Trainer make its accelerator from arguments that the engine has taken over."""
        if not hasattr(self, "turbo"):
            self._start_engine()
            if self.model is not None:
                self.turbo.prepare(self.model)
        super().create_accelerator_and_postprocess()
        self._leave_the_model_to_the_engine()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Prepare each model that the user's own function makes."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        if problems := self.turbo.problems(model) + weightless(model, self._weights):
            fail(problems)
        return self.turbo.prepare(model)

    def _start_engine(self) -> None:
        args = self.args
        said = said_values(args)
        config = self._build_config(said) if self._turbo_config is None else self._checked(self._turbo_config, said)
        if self.turbo_announces:
            base.apply_log_level(config)
        plan = base.plan_batch(
            config, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        )
        runtime = current_runtime(use_cpu=args.use_cpu)
        found = (base.device_problem(args.device.type, runtime), base.launch_problem(args.world_size))
        problems = [*(plan if isinstance(plan, list) else []), *(problem for problem in found if problem)]
        hooks, wrong = self._hooks(config, runtime)
        context = Context(
            runtime, args.world_size, args.process_index, hooks=hooks, weights=self._weights, averaged=True
        )
        engine = Engine(config, context)
        problems += wrong
        if clash := loss_clash(config, args.label_smoothing_factor) or compile_clash(config, args.torch_compile):
            problems.append(clash)
        problems += term_clashes(config, hooks.plugins, args.label_smoothing_factor)
        problems += sequence_clashes(config, args, trainer=type(self)) + shard_clashes(said, context.sharded)
        if self.model is not None:
            problems += engine.problems(self.model) + weightless(self.model, self._weights)
        if problems or isinstance(plan, list):
            fail(problems)
        self._one_device_a_process()
        self.args = taken_over(args, plan.accumulation)
        self.turbo, self.turbo_plan = engine, plan
        if self.turbo_announces:
            where = place("gradient_accumulation_steps", typed=False)
            base.report_accumulation(config, plan, said.get("gradient_accumulation_steps"), where)
            base.announce(config, plan)
        for name in idle_for_fsdp2(said) if context.sharded else ():
            log.warning_rank0("%s is for DistributedDataParallel: FSDP2 has no use for it", place(name, typed=False))

    def _build_config(self, said: Mapping[str, Any]) -> EngineConfig:
        problems = base.environment_clashes() + clashes(said)
        return base.checked_config(merge_args(get_torchturbo_args(), framework=framework_values(said)), problems)

    def _checked(self, config: EngineConfig, said: Mapping[str, Any]) -> EngineConfig:
        """Hold a configuration that was given as an object against what the framework was told."""
        problems = base.environment_clashes() + clashes(said)
        if problems:
            fail(problems)
        for path, value, where in framework_values(said):
            if config.get(path) != value:
                log.warning_rank0(
                    "%s gives way to the configuration given in code: %s = %s", where, path, shown(config.get(path))
                )
        return config

    def _hooks(self, config: EngineConfig, runtime: Runtime) -> tuple[Hooks, list[Problem]]:
        """Return the plugins of this run, the user's and the engine's own, and what is wrong with the user's."""
        loaded: Sequence[Plugin] | None = self._loaded_plugins
        problems: list[Problem] = []
        if loaded is None:
            loaded, problems = load_plugins(config, self.turbo_framework)
        wrong = [plugin for plugin in self._given_plugins if not isinstance(plugin, Plugin)]
        problems += [
            Problem("turbo_plugins", "", f"{plugin!r:.60} is no plugin", "give objects of Plugin's subclasses")
            for plugin in wrong
        ]
        plugins = [*loaded, *(plugin for plugin in self._given_plugins if plugin not in wrong)]
        problems = problems or equal_names(plugins)
        args = self.args
        output_dir = Path(args.output_dir)
        run = Run(config, runtime, args.world_size, args.process_index, output_dir, self.turbo_framework, trainer=self)
        return Hooks(run, [*plugins, *pipeline.observers(config)]), problems

    def _one_device_a_process(self) -> None:
        """Keep Trainer from wrapping the model in DataParallel where one process sees several devices."""
        if self.args.n_gpu > 1:
            log.warning_rank0(
                "%d devices, one process: training on one of them (use torchrun --nproc_per_node %d for all)",
                self.args.n_gpu,
                self.args.n_gpu,
            )
            self.args._n_gpu = 1

    # ---- losses ----

    def _settle_loss_owner(self) -> None:
        """Leave the scaling of losses to one owner: the normaliser, or Trainer where the user brought an own loss."""
        context = self.turbo.context
        if self.compute_loss_func is not None or self.label_smoother is not None:
            clash = loss_clash(self.turbo.config, 0, self.compute_loss_func)
            terms = term_clashes(self.turbo.config, context.hooks.plugins, 0, self.compute_loss_func)
            parts = sequence_clashes(self.turbo.config, self.args, self.compute_loss_func)
            if problems := [*([clash] if clash else []), *terms, *parts]:
                fail(problems)
            context.normaliser = None
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind)]
        self._plain_loss = owners[:2] == [TurboMixin, Trainer]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | int | None:
        normaliser = self.turbo.context.normaliser
        begins = self._step_begins  # an evaluation counts too, and is no step
        self._mask_blocks(batch_samples, self.state.global_step if begins else EVALUATION)
        self._tell_step_begins(batch_samples)
        if normaliser is None:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc, no-any-return]
        if batch_samples and (real := self._real_rows(find_batch_size(batch_samples[-1]) or 0)) is not None:
            for name in ("labels", "shift_labels"):  # rows that only fill up the last round of ranks count in no mean
                if name in batch_samples[-1]:
                    batch_samples[-1][name][real:] = IGNORE_INDEX
        return normaliser.open_window(batch_samples, device, with_terms=begins)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss with the normaliser in force."""
        normaliser = self.turbo.context.normaliser
        if normaliser is None:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        # Trainer multiplies by the ranks at the end of its own compute_loss. That is right for a loss that did not go
        # through the normaliser (fused kernels replace the model's forward), and a second time for one that did.
        self.args.average_tokens_across_devices = True
        with normaliser.applied(on_scaled=lambda: setattr(self.args, "average_tokens_across_devices", False)):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        """Autocast as the configuration says, in training and evaluation."""
        with super().compute_loss_context_manager(), self.turbo.autocast():  # type: ignore[misc]
            yield

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the loss is the mean over the tokens, so that it does not depend on batches and ranks."""
        with self.turbo.context.hooks.aside():
            return self._with_token_mean(super().evaluation_loop, *args, **kwargs)  # type: ignore[misc]

    def _with_token_mean(self, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        normaliser = self.turbo.context.normaliser
        if normaliser is None:
            return loop(*args, **kwargs)
        with normaliser.window_kept():
            if not self._plain_loss:
                return loop(*args, **kwargs)
            normaliser.evaluation = TokenMean()
            try:
                output = loop(*args, **kwargs)
                loss = normaliser.evaluation.reduced(normaliser.ranks, normaliser.group, self.args.device)
            finally:
                normaliser.evaluation = None
        name = f"{kwargs.get('metric_key_prefix', args[4] if len(args) > 4 else 'eval')}_loss"
        if loss is not None and name in output.metrics:
            output.metrics[name] = loss
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch; rows that only fill up the last round of ranks count in no mean."""
        if (normaliser := self.turbo.context.normaliser) is not None and normaliser.evaluation is not None:
            normaliser.evaluation.real_rows = self._real_rows(find_batch_size(inputs) or 0)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _real_rows(self, rows: int) -> int | None:
        """Return how many rows of this rank's batch belong to the dataset; None where all do.

        accelerate gives every data-parallel rank of the last round a full batch, one after the other, and fills up
        from the start.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return None
        context = self.turbo.context
        return max(0, min(rows, int(state.remainder) - context.plan.dp_rank(context.rank) * rows))


@functools.cache
def turbo(trainer_class: type) -> type:
    """Return a subclass of a Trainer class with the engine underneath: ``turbo(SFTTrainer)(model=..., args=...)``."""
    return type(f"Turbo{trainer_class.__name__}", (TurboMixin, trainer_class), {"__doc__": trainer_class.__doc__})


class TurboTrainer(TurboMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with the engine underneath."""
