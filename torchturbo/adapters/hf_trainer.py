"""The engine under Hugging Face's Trainer: :class:`TurboTrainer`, and :func:`turbo` for any subclass of Trainer.

Both read :func:`torchturbo.engine.args.get_torchturbo_args`, or a configuration given as ``turbo_config``. Methods of
Trainer that are overridden exist in transformers 5.6 and 5.24; tests/adapters holds their signatures.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate.utils import find_batch_size
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import clashes, framework_values, place, said_values, taken_over
from torchturbo.checkpoint.files import clear_staging, publish_folder, staging_folder
from torchturbo.checkpoint.record import read_facts, run_facts, write_record
from torchturbo.checkpoint.resume import find_checkpoint, has_record, resume_problems
from torchturbo.config.keys import shown
from torchturbo.engine import pipeline
from torchturbo.engine.args import get_torchturbo_args
from torchturbo.engine.config import merge_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.generated.keys import KEYS
from torchturbo.logging import get_logger
from torchturbo.objectives.normalise import IGNORE_INDEX, TokenMean
from torchturbo.parallel.agree import together
from torchturbo.parallel.batch import BatchPlan
from torchturbo.runtime import current_runtime

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchturbo.engine.config import EngineConfig

log = get_logger(__name__)

OPTIMIZER_ARGUMENTS = {
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
"""Training arguments that a loaded optimizer state brings back, and the option of a parameter group each becomes."""


class TurboMixin:
    """Puts the engine under the Trainer class that follows it in the method order."""

    turbo: Engine
    """The engine, from the first line of Trainer's constructor on."""
    turbo_plan: BatchPlan
    """What one optimizer step consists of."""
    turbo_announces: bool = True
    """Whether the start says what is in force; a program that has its own start lines turns it off."""
    turbo_facts: Mapping[str, Any] = {}
    """What a resumed run must share with this one beyond its training arguments, by name."""

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        state: Any
        compute_loss_func: Any
        label_smoother: Any
        accelerator: Any
        optimizer: Any
        lr_scheduler: Any

    def __init__(self, *args: Any, turbo_config: EngineConfig | None = None, **kwargs: Any) -> None:
        self._turbo_config = turbo_config
        self._staged: Path | None = None
        self._allowed: dict[str, Any] = {}
        super().__init__(*args, **kwargs)
        self._settle_loss_owner()

    # Trainer's constructor calls this first, with `self.args` and `self.model` set and nothing derived from them yet.
    # It is the one place that any subclass passes, whatever arguments its own constructor has.
    def create_accelerator_and_postprocess(self) -> None:
        """Start the engine, then let Trainer make its accelerator from arguments that the engine has taken over."""
        if not hasattr(self, "turbo"):
            self._start_engine()
            if self.model is not None:
                self.turbo.prepare(self.model)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Prepare each model that the user's own function makes."""
        return self.turbo.prepare(super().call_model_init(trial))  # type: ignore[misc]

    def _start_engine(self) -> None:
        args = self.args
        said = said_values(args)
        config = self._build_config(said) if self._turbo_config is None else self._checked(self._turbo_config, said)
        base.apply_log_level(config)
        plan = base.plan_batch(
            config, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        )
        runtime = current_runtime(use_cpu=args.use_cpu)
        found = (plan, base.device_problem(args.device.type, runtime), base.launch_problem(args.world_size))
        problems = [problem for problem in found if isinstance(problem, Problem)]
        if problems or isinstance(plan, Problem):
            fail(problems)
        self._one_device_a_process()
        self.args = taken_over(args, plan.accumulation)
        context = Context(runtime, args.world_size, args.process_index)
        self.turbo, self.turbo_plan = Engine(config, context), plan
        if self.turbo_announces:
            where = place("gradient_accumulation_steps", typed=False)
            base.report_accumulation(config, plan, said.get("gradient_accumulation_steps"), where)
            base.announce(config, plan)

    def _build_config(self, said: Mapping[str, Any]) -> EngineConfig:
        problems = base.environment_clashes() + clashes(said)
        return base.checked_config(merge_args(get_torchturbo_args(), framework=framework_values(said)), problems)

    def _checked(self, config: EngineConfig, said: Mapping[str, Any]) -> EngineConfig:
        """Hold a configuration that was given as an object against what the framework was told."""
        problems = base.environment_clashes() + clashes(said) + pipeline.inactive_problems(config.changed())
        if problems:
            fail(problems)
        for path, value, where in framework_values(said):
            if config.get(path) != value:
                log.warning_rank0(
                    "%s gives way to the configuration given in code: %s = %s", where, path, shown(config.get(path))
                )
        return config

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
            context.normaliser = None
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind)]
        self._plain_loss = owners[:2] == [TurboMixin, Trainer]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | int | None:
        normaliser = self.turbo.context.normaliser
        if normaliser is None:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc, no-any-return]
        if batch_samples and (real := self._real_rows(find_batch_size(batch_samples[-1]) or 0)) is not None:
            for name in ("labels", "shift_labels"):  # rows that only fill up the last round of ranks count in no mean
                if name in batch_samples[-1]:
                    batch_samples[-1][name][real:] = IGNORE_INDEX
        return normaliser.open_window(batch_samples, device)

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
        normaliser = self.turbo.context.normaliser
        if normaliser is None:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        with normaliser.window_kept():
            if not self._plain_loss:
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            normaliser.evaluation = TokenMean()
            try:
                output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
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
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _real_rows(self, rows: int) -> int | None:
        """Return how many rows of this rank's batch belong to the dataset; None where all do.

        accelerate gives every rank of the last round a full batch, rank after rank, and fills up from the start.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return None
        return max(0, min(rows, int(state.remainder) - self.turbo.context.rank * rows))

    # ---- checkpoints ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is compared with this run first."""
        if resume_from_checkpoint:
            with together("comparing with the checkpoint"):
                resume_from_checkpoint = str(self._checkpoint(resume_from_checkpoint))
        if self.args.should_save:
            clear_staging(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _checkpoint(self, wanted: str | bool) -> Path:
        """Return the checkpoint to resume from, after comparing it with this run."""
        folder = find_checkpoint(wanted, Path(self.args.output_dir), "resume_from_checkpoint")
        if isinstance(folder, Problem):
            raise ConfigError([folder])
        self._compare_with(folder)
        return folder

    def _compare_with(self, folder: Path) -> None:
        if not has_record(folder):
            log.warning_rank0("%s does not say how it was made: resuming without comparing", folder)
            return
        problems, allowed = resume_problems(folder, self.turbo.config, self.turbo_run(), resume_flag())
        if problems:
            raise ConfigError(problems)
        self._allowed = {name: (read_facts(folder) or {}).get(name) for name in allowed}
        for name in allowed:
            log.warning_rank0("resuming with another %s than the checkpoint's, as allowed", name)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        made = [dict(group) for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        for name in self._allowed.keys() & OPTIMIZER_ARGUMENTS.keys():
            option = OPTIMIZER_ARGUMENTS[name]
            for group, wanted in zip(self.optimizer.param_groups, made, strict=True):
                group |= {option: wanted[option]} if option in wanted else {}
        if before := self._allowed.get("learning_rate"):
            # The loaded optimizer and scheduler bring the old rate; whoever allowed another one wants it to hold.
            ratio = self.args.learning_rate / before
            for group in self.optimizer.param_groups:
                group |= {name: group[name] * ratio for name in ("lr", "initial_lr") if name in group}
            self.lr_scheduler.base_lrs = [rate * ratio for rate in self.lr_scheduler.base_lrs]
            self.lr_scheduler._last_lr = [rate * ratio for rate in self.lr_scheduler.get_last_lr()]

    def turbo_run(self) -> dict[str, Any]:
        """Return the facts of this run that its record holds."""
        return run_facts(self.args, self.turbo.context.world_size, self.turbo_facts)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model with the key-value cache it came with: training goes without, generating should not."""
        with self.turbo.cache_as_found(self.model):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any = None) -> str:
        return super()._get_output_dir(trial) if self._staged is None else str(self._staged)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint beside its place and rename it when it is whole, on every rank's behalf.

        Trainer asks :meth:`_get_output_dir` where to write, so it writes into the staging folder; what it derives
        from that folder (the best checkpoint's path, the rotation) is put right afterwards.
        """
        if self.args.push_to_hub:  # uploads go on in the background from the folder they were started in
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            if self.args.should_save:
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
                write_record(folder, self.turbo.config, self.turbo_run(), self.state.global_step)
            return
        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged = staging_folder(run_dir)
        self._staged = staged
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        except BaseException:
            shutil.rmtree(staged / name, ignore_errors=True)
            raise
        finally:
            self._staged = None
        self._correct_best(staged, run_dir)
        _barrier()
        if self.args.should_save:
            self._publish(staged / name, run_dir / name)
        _barrier()

    def _correct_best(self, staged: Path, run_dir: Path) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == staged:
            self.state.best_model_checkpoint = str(run_dir / Path(best).name)

    def _publish(self, staged: Path, folder: Path) -> None:
        self.state.save_to_json(str(staged / "trainer_state.json"))
        write_record(staged, self.turbo.config, self.turbo_run(), self.state.global_step)
        publish_folder(staged, folder)
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


@functools.cache
def resume_flag() -> str:
    """Return the option that allows a difference on resume."""
    return str(KEYS["resume_allow"].cli)


@functools.cache
def turbo(trainer_class: type) -> type:
    """Return a subclass of a Trainer class with the engine underneath: ``turbo(SFTTrainer)(model=..., args=...)``."""
    return type(f"Turbo{trainer_class.__name__}", (TurboMixin, trainer_class), {"__doc__": trainer_class.__doc__})


class TurboTrainer(TurboMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with the engine underneath."""
