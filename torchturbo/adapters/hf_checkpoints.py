"""Checkpoints under Hugging Face's Trainer: compared on resume, staged, recorded, and renamed when they are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import rotate_checkpoints

from torchturbo.checkpoint.damage import saved_step
from torchturbo.checkpoint.files import clear_staging, publish_folder, staging_folder
from torchturbo.checkpoint.record import read_facts, run_facts, write_record
from torchturbo.checkpoint.resume import find_checkpoint, has_record, resume_flag, resume_problems
from torchturbo.errors import ConfigError, Problem, fail, shorten
from torchturbo.logging import get_logger
from torchturbo.parallel.agree import together
from torchturbo.plugins.load import plugin_facts

if TYPE_CHECKING:
    from torchturbo.engine.engine import Engine

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

    _staged: Path | None = None
    _resuming: bool = False
    _allowed: Mapping[str, Any] = {}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is compared with this run first."""
        with self.turbo.context.hooks.ending():
            if resume_from_checkpoint:
                with together("comparing with the checkpoint"):
                    resume_from_checkpoint = str(self._checkpoint(resume_from_checkpoint))
            if self.model is not None and not any(parameter.requires_grad for parameter in self.model.parameters()):
                fail([Problem("", "", "nothing is left to train: every parameter is frozen", "freeze less")])
            if self.args.should_save:
                clear_staging(Path(self.args.output_dir))
            if self.model is not None and not self.turbo.owns(self.model):
                self.turbo.prepare(self.model)  # another trainer was made of the same model since, or it was released
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
        with _loading(checkpoint):
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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._resuming = True
        try:
            with _loading(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        finally:
            self._resuming = False

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
            names = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            raise ValueError(f"its weights lack {len(missing)} of the model's: {names}")
        super()._issue_warnings_after_load(load_result)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _loading(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def turbo_run(self) -> dict[str, Any]:
        """Return the facts of this run that its record holds."""
        context = self.turbo.context
        return run_facts(self.args, context.world_size, {**self.turbo_facts, **plugin_facts(context.hooks.plugins)})

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
        hooks = self.turbo.context.hooks
        with hooks.aside():
            if self.args.push_to_hub:  # uploads go on in the background from the folder they were started in
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
                hooks.call("save_checkpoint", folder)
                if self.args.should_save:
                    write_record(folder, self.turbo.config, self.turbo_run(), self.state.global_step)
            else:
                self._save_staged(model, trial)

    def _save_staged(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged = staging_folder(run_dir)
        self._staged = staged
        try:
            with together("saving the checkpoint"):  # one rank's full disk ends all of them
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self.turbo.context.hooks.call("save_checkpoint", staged / name)
        except BaseException:
            shutil.rmtree(staged / name, ignore_errors=True)
            raise
        finally:
            self._staged = None
        self._correct_best(staged, run_dir)
        with together("publishing the checkpoint"):
            if self.args.should_save:
                self._publish(staged / name, run_dir / name)

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
