"""Checkpoints under Hugging Face's Trainer: compared on resume, staged, recorded, and renamed when they are whole.

What is exact is written natively (:mod:`torchturbo.checkpoint.native`), in the background; what others read, the
export, at once, for gathering it takes the ranks' collectives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from torchturbo.checkpoint import native, output, resume
from torchturbo.checkpoint.background import Background
from torchturbo.checkpoint.claims import Claims
from torchturbo.checkpoint.damage import STATE_NAME, saved_step
from torchturbo.checkpoint.files import remove, staging_folder
from torchturbo.checkpoint.hf_export import export
from torchturbo.checkpoint.layout import NATIVE, is_native
from torchturbo.checkpoint.record import exports_each, read_facts, run_facts, write_record
from torchturbo.checkpoint.resume import agreed_checkpoint, format_problem, has_record, resume_flag, resume_problems
from torchturbo.errors import ConfigError, Problem, fail, shorten, some
from torchturbo.logging import get_logger
from torchturbo.parallel.agree import everywhere, together
from torchturbo.plugins.load import plugin_facts

if TYPE_CHECKING:
    from torchturbo.engine.engine import Engine
    from torchturbo.parallel.batch import BatchPlan

log = get_logger(__name__)

OPTIMIZER_ARGUMENTS = {
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
"""Training arguments that a loaded optimizer state brings back, and the option of a parameter group each becomes."""


class CheckpointMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does about checkpoints."""

    turbo: Engine
    turbo_facts: Mapping[str, Any] = {}
    """What a resumed run must share with this one beyond its training arguments, by name."""

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        state: Any
        optimizer: Any
        lr_scheduler: Any
        accelerator: Any
        callback_handler: Any
        processing_class: Any
        data_collator: Any
        turbo_plan: BatchPlan

    _staged: Path | None = None
    _resuming: bool = False
    _in_checkpoint: Path | None = None
    _told_of_draws: bool = False
    _told_of_waiting: bool = False
    _allowed: Mapping[str, Any] = {}
    _writing: Background | None = None

    @functools.cached_property
    def _claims(self) -> Claims:
        """Return the folders that this run alone may save in."""
        return Claims()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is compared with this run first."""
        with self.turbo.context.hooks.ending():
            if resume_from_checkpoint:
                with together("comparing with the checkpoint"):
                    resume_from_checkpoint = str(self._checkpoint(resume_from_checkpoint))
            if self.model is not None and not any(parameter.requires_grad for parameter in self.model.parameters()):
                fail([Problem("", "", "nothing is left to train: every parameter is frozen", "freeze less")])
            try:
                if getattr(self, "hp_search_backend", None) is None:  # trials of a search have folders of their own
                    saves, rank = self.args.save_strategy != "no", self.turbo.context.rank
                    output.begin(self._claims, Path(self.args.output_dir), rank=rank, saves=saves)
                if self.model is not None and not self.turbo.owns(self.model):
                    self.turbo.prepare(self.model)  # another trainer was made of the same model since, or it's released
                result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
                self._checkpoints.finish()
            except BaseException:
                self._checkpoints.abandon()
                raise
            finally:
                self._claims.release()
            return result

    @property
    def _checkpoints(self) -> Background:
        """Return what writes this run's checkpoints."""
        if self._writing is None:
            context = self.turbo.context
            self._writing = Background(context.world_size, context.rank, context.runtime)
        return self._writing

    def _checkpoint(self, wanted: str | bool) -> Path:
        """Return the checkpoint to resume from, after comparing it with this run. A collective."""
        folder = agreed_checkpoint(wanted, Path(self.args.output_dir), "resume_from_checkpoint")
        if isinstance(folder, Problem):
            raise ConfigError([folder])
        if problem := format_problem(folder, self.turbo.context.sharded):
            raise ConfigError([problem])
        self._compare_with(folder)
        return folder

    def _compare_with(self, folder: Path) -> None:
        if not has_record(folder):
            log.warning_rank0("%s does not say how it was made: resuming without comparing", folder)
            return
        problems, allowed = resume_problems(folder, self.turbo.config, self.turbo_run(), resume_flag())
        if problems:
            raise ConfigError(problems)
        resume.tell_objectives(folder, self.turbo.config)
        self._allowed = {name: (read_facts(folder) or {}).get(name) for name in allowed}
        for name in allowed:
            log.warning_rank0("resuming with another %s than the checkpoint's, as allowed", name)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        made = [dict(group) for group in self.optimizer.param_groups]
        with _loading(checkpoint):
            if checkpoint is not None and is_native(Path(checkpoint)):
                self._load_native_optimizer(Path(checkpoint))
            else:
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
        hooks = self.turbo.context.hooks
        if checkpoint is not None and hooks.run is not None:
            hooks.run.step = saved_step(Path(checkpoint))
            hooks.call("load_checkpoint", Path(checkpoint))

    def _load_native_optimizer(self, folder: Path) -> None:
        optimizer, scheduler = _bare(self.optimizer), self.lr_scheduler
        native.load_optimizer(self.model, optimizer, folder / NATIVE, self._checkpoints.group)
        saved = torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True)
        groups = optimizer.param_groups
        if len(saved.get("base_lrs", groups)) != len(groups):  # they are split by mesh, and have their rates by now
            saved["base_lrs"] = [group["initial_lr"] for group in groups]
            saved["_last_lr"] = [group["lr"] for group in groups]
            if "lr_lambdas" in saved:
                saved["lr_lambdas"] = [None] * len(groups)  # Transformers' keep nothing
        scheduler.load_state_dict(saved)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._resuming = True
        try:
            with _loading(resume_from_checkpoint):
                if is_native(folder := Path(resume_from_checkpoint)):
                    native.load_model(self.model if model is None else model, folder / NATIVE, self._checkpoints.group)
                else:
                    super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        finally:
            self._resuming = False

    def _load_best_model(self) -> None:
        self._checkpoints.finish()
        best = Path(self.state.best_model_checkpoint)
        if not is_native(best) and not self.turbo.context.sharded:
            super()._load_best_model()  # type: ignore[misc]
            return
        log.info_rank0("loading the best model, %s (%s)", best.name, self.state.best_metric)
        with _loading(str(best)):
            if not is_native(best):
                raise ValueError(f"there is no {NATIVE} in it")
            native.load_model(self.model, best / NATIVE, self._checkpoints.group)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._checkpoints.finish()  # before old ones are removed
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._checkpoints.poll()
        return super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint whose weights lack some of the model's, which would go on with the ones it was loaded from.

        Weights that others share their storage with (a tied head) are in no file twice.
        """
        tensors = self.model.state_dict()
        loaded = {tensors[name].data_ptr() for name in tensors.keys() - set(load_result.missing_keys)}
        missing = [
            name for name in load_result.missing_keys if name in tensors and tensors[name].data_ptr() not in loaded
        ]
        if missing and self._resuming:
            raise ValueError(f"its weights lack {len(missing)} of the model's: {some(missing)}")
        super()._issue_warnings_after_load(load_result)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._tell_of_draws(checkpoint)
        with _loading(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _tell_of_draws(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._told_of_draws:
            return
        self._told_of_draws = True
        saved, now = (read_facts(Path(checkpoint)) or {}).get("world_size"), self.turbo.context.world_size
        if isinstance(saved, int) and saved != now:
            text = (
                "%s holds the random states of %d ranks, this run has %d: dropout draws differ, data and schedule don't"
            )
            log.warning_rank0(text, checkpoint, saved, now)

    def turbo_run(self) -> dict[str, Any]:
        """Return the facts of this run that its record holds."""
        plugins = self.turbo.context.hooks.plugins
        return run_facts(self.args, self.turbo_plan, {**self.turbo_facts, **plugin_facts(plugins)})

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the model for others: its weights as they came, its configuration, its tokenizer. A collective.

        It is saved with the key-value cache it came with: training goes without, generating should not.
        """
        folder = Path(output_dir or self.args.output_dir)
        if folder == self._in_checkpoint and not (exports_each(self.turbo.config) or self.args.save_only_model):
            folder.mkdir(parents=True, exist_ok=True)
            return
        with self.turbo.cache_as_found(self.model):
            if self.args.should_save or not self.turbo.context.sharded:
                super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
            else:
                self._save(str(folder))  # Trainer takes the first rank alone there

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what :meth:`save_model` writes; a sharded model's weights are gathered by all ranks, piece by piece."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        folder = Path(output_dir or self.args.output_dir)
        if state_dict is not None or not _is_exportable(model):
            if state_dict is None and self.turbo.context.sharded:
                whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state_dict = get_model_state_dict(model, options=whole)
            with together("saving the model"):
                if self.args.should_save:
                    super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        export(model, folder, saved_dtypes=self.turbo.context.saved_dtypes)
        with together("exporting the model"):
            if self.args.should_save:
                processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if processing is not None:
                    processing.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        if self._staged is None:  # otherwise it follows when everything else is there
            native.save(native.capture(self.model, _bare(self.optimizer)), folder / NATIVE, self._checkpoints.group)

    def _get_output_dir(self, trial: Any = None) -> str:
        return super()._get_output_dir(trial) if self._staged is None else str(self._staged)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint beside its place and rename it when it is whole, on every rank's behalf.

        Trainer asks :meth:`_get_output_dir` where to write, so it writes into the staging folder; what it derives
        from that folder (the best checkpoint's path, the rotation) is put right afterwards.
        """
        with self.turbo.context.hooks.aside():
            self._checkpoints.finish()
            run_dir, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
            # Uploads go on in the background from the folder they were started in.
            self._in_checkpoint = (run_dir if self.args.push_to_hub else staging_folder(run_dir)) / name
            try:
                if self.args.push_to_hub:
                    self._save_in_place(model, trial, self._in_checkpoint)
                else:
                    self._save_staged(model, trial, self._in_checkpoint, run_dir)
            finally:
                self._in_checkpoint = None

    def _save_in_place(self, model: Any, trial: Any, folder: Path) -> None:
        with together("saving the checkpoint"):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            if self.args.save_only_model:
                native.save(native.capture(self.model, None), folder / NATIVE, self._checkpoints.group)
            self.turbo.context.hooks.call("save_checkpoint", folder)
            if self.args.should_save:
                write_record(folder, self.turbo.config, self.turbo_run(), self.state.global_step)

    def _save_staged(self, model: Any, trial: Any, staged: Path, run_dir: Path) -> None:
        output.take(self._claims, run_dir, staged, rank=self.turbo.context.rank)
        self._staged = staged.parent
        try:
            with together("saving the checkpoint"):  # one rank's full disk ends all of them
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self.turbo.context.hooks.call("save_checkpoint", staged)
                if self.args.should_save:
                    self._correct_best(staged.parent, run_dir)
                    self.state.save_to_json(str(staged / STATE_NAME))
                optimizer = None if self.args.save_only_model else _bare(self.optimizer)
                state = native.snapshot(native.capture(self.model, optimizer))
        except BaseException:
            if self.args.should_save:
                remove(staged)
            raise
        finally:
            self._staged = None
        self._correct_best(staged.parent, run_dir)
        record = functools.partial(write_record, staged, self.turbo.config, self.turbo_run(), self.state.global_step)
        self._checkpoints.start(state, staged, run_dir / staged.name, record, functools.partial(self._rotate, run_dir))
        readers = self._told_of_saves()
        if self._checkpoints.any_rank(bool(readers)):
            self._tell_of_waiting(readers)
            self._checkpoints.finish()

    def _told_of_saves(self) -> list[str]:
        """Return the callbacks of this rank that are told of each save: they may read the checkpoint, or add to it."""
        own = []
        for callback in self.callback_handler.callbacks:
            method = getattr(callback, "on_save", None)  # of its class or its own; Trainer asks for no base class
            if method is not None and getattr(method, "__func__", method) is not TrainerCallback.on_save:
                own.append(type(callback).__name__)
        return own

    def _tell_of_waiting(self, readers: list[str]) -> None:
        """Say once for whom each save waits. A collective the first time."""
        if not self._told_of_waiting:
            self._told_of_waiting = True
            names = sorted({name for own in everywhere(readers) for name in own})
            text = "each save waits until the checkpoint is written, for these callbacks are told of it (on_save): %s"
            log.info_rank0(text, ", ".join(names))

    def _correct_best(self, staged: Path, run_dir: Path) -> None:
        """Look for the best checkpoint as Trainer does, where checkpoints get their names.

        After the folder was moved that is another place than the one that the resumed state names.
        """
        if self.state.best_global_step:
            name = f"checkpoint-{self.state.best_global_step}"
            if (run_dir / name).is_dir() or (staged / name).is_dir():
                self.state.best_model_checkpoint = str(run_dir / name)

    def _rotate(self, run_dir: Path) -> None:
        rotate_checkpoints(
            output_dir=str(run_dir),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


def _is_exportable(model: Any) -> bool:
    """Return whether a model has a format for others: Transformers' or, for adapters, PEFT's."""
    peft = sys.modules.get("peft")
    return isinstance(model, (PreTrainedModel, *([peft.PeftModel] if peft else [])))


def _bare(optimizer: Any) -> Any:
    """Return an optimizer without accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


@contextmanager
def _loading(checkpoint: str | None) -> Iterator[None]:
    """Tell of a file that was whole when it was looked at and can't be loaded: another was put in its place since."""
    if checkpoint is None:
        yield
        return
    with together("loading the checkpoint"):
        try:
            yield
        except Exception as error:
            message = f"can't be loaded: {shorten(' '.join(str(error).split()) or type(error).__name__, 300)}"
            raise ConfigError([Problem(str(checkpoint), "", message, "use another checkpoint")]) from error
