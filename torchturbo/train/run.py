"""One training run from its command line to its last line: ``torchturbo train``, and :func:`train` for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout  # torch and transformers both depend on it
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from torchturbo.adapters import base
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.damage import STATE_NAME, saved_step
from torchturbo.checkpoint.files import clear_staging, publish_files, remove, staging_folder
from torchturbo.checkpoint.record import CONFIG_NAME, write_record
from torchturbo.checkpoint.resume import checkpoints
from torchturbo.engine.config import EngineConfig
from torchturbo.engine.model import set_cache
from torchturbo.engine.steps.determinism import restored_determinism
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.generated.keys import KEYS
from torchturbo.logging import LogLevel, at_least, get_logger
from torchturbo.objectives.heads import BESIDE
from torchturbo.observe.size import size
from torchturbo.parallel.agree import from_first, together
from torchturbo.train.batches import Collator, packing_leak
from torchturbo.train.commandline import Command, read_command
from torchturbo.train.console import Progress, Watch, duration, library_bars
from torchturbo.train.curve import NAME as CURVE_NAME
from torchturbo.train.curve import loss_points, write_curve
from torchturbo.train.model import load_model, pad_token_id, weight_source
from torchturbo.train.prepare import Job, check_heads, prepare, vocabulary

MOST_LEAK = 1e-3
MOST_LEAK_BF16 = 3e-2
"""Relative change of the logits that rounding explains; attention across documents changes them by far more."""
WEIGHT_FILES = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", BESIDE)
"""What holds a model's weights: an older run's file of these would be loaded beside, or before, the new ones."""
LOCK = ".torchturbo.lock"
log = get_logger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a run left."""

    output_dir: Path
    log_history: list[dict[str, Any]] = field(repr=False)
    final_loss: float | None
    """The last logged training loss."""
    steps: int
    seconds: float
    config: EngineConfig = field(repr=False)
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    curve: Path | None
    trainer: Any = field(repr=False)
    peak_memory: int | None = None
    """The most bytes this process held on its device, what the allocator keeps free included; None if not known."""
    trained: bool = True
    """Whether it took a step: a run that resumes from its own end takes none."""
    resumed_at: int = 0
    """Steps that the checkpoint had behind it from which the run was resumed."""


def train(argv: Sequence[str], *, callbacks: Sequence[Any] = (), quiet: bool = False) -> TrainResult:
    """Fine-tune a model as ``torchturbo train`` does.

    Parameters
    ----------
    argv
        The command line after ``torchturbo train``.
    callbacks
        Transformers' callbacks, added to the trainer's own.
    quiet
        Whether the caller draws the console: no start lines, progress and summary then.

    Raises
    ------
    ConfigError
        With everything that is wrong before the weights are read; its lines are printed.

    """
    return run_command(read_command(argv), callbacks=callbacks, quiet=quiet)


def run_command(command: Command, *, callbacks: Sequence[Any] = (), quiet: bool = False) -> TrainResult:
    """Train as a command line says that has been read; see :func:`train`."""
    say: Callable[..., None] = _nothing if quiet else log.info_rank0
    job = prepare(command)
    _announce(job, say)
    with restored_determinism(), library_bars(shown=False), at_least(LogLevel.WARNING if quiet else LogLevel.DEBUG):
        with together("loading the model"), library_bars(shown=not quiet and sys.stderr.isatty()):
            job.weights = weight_source(job.model_arguments, job.model_config)
            check_heads(job)
            model = load_model(job.model_arguments, job.model_config, job.weights if job.is_sharded else None)
        if not job.is_sharded:
            _check_packing(job, model.to(job.training.device))
        say("model: %s, %s", type(model).__name__, _parameters(model))
        with _output_of_its_own(job):
            result = _train(job, model, callbacks, quiet)
    _summarise(result, say)
    result.trainer.turbo.context.hooks.raise_end_errors()
    return result


def _train(job: Job, model: Any, callbacks: Sequence[Any], quiet: bool) -> TrainResult:
    progress = Progress()
    own = [_Begin(job), Watch(), *([] if quiet else [progress])]
    trainer = make_trainer(job, model, [*own, *callbacks])
    if job.is_sharded:  # which has its weights only now
        _check_packing(job, model)
    started = time.monotonic()
    try:
        if job.is_finished:
            with trainer.turbo.context.hooks.ending():
                _load_finished(job, trainer)
        else:
            trainer.train(str(job.resume) if job.resume else None)
    finally:
        progress.close()
        curve = _draw(job, trainer)
    seconds = time.monotonic() - started
    _save(job, trainer)
    return _result(job, trainer, seconds, curve)


def _load_finished(job: Job, trainer: TurboTrainer) -> None:
    """Take a finished run as it was saved, or as it was best where that was asked for.

    Trainer would train one more step, beyond the end of the schedule.
    """
    trainer._load_from_checkpoint(str(job.resume))
    trainer.state = TrainerState.load_from_json(str(job.resume / STATE_NAME))  # type: ignore[operator]
    best = trainer.state.best_model_checkpoint
    if not job.training.load_best_model_at_end or best is None:
        return
    if from_first("looking for the best model", Path(best).is_dir):
        trainer._load_best_model()
    else:
        log.warning_rank0("%s, the best checkpoint, is gone: the model is the one of %s", best, job.resume)


@contextmanager
def _output_of_its_own(job: Job) -> Iterator[None]:
    """Keep a second run out of the output folder: each would remove what the other is writing."""
    lock = FileLock(job.output_dir / LOCK)
    with together("taking the output folder"):
        if job.training.should_save:
            job.output_dir.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                message = f"another run is writing to {job.output_dir}"
                raise ConfigError(
                    [Problem("--output_dir", "", message, "use another folder, or wait for it")]
                ) from None
            except OSError as error:
                message = f"{job.output_dir / LOCK} can't be locked: {error.strerror or error}"
                raise ConfigError([Problem("--output_dir", "", message, "use another folder")]) from error
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()
            lock_file = job.output_dir / LOCK
            lock_file.unlink(missing_ok=True)


class RunTrainer(TurboTrainer):
    """The trainer of ``torchturbo train``, which has start lines of its own."""

    turbo_announces = False


def make_trainer(job: Job, model: Any, callbacks: Sequence[Any]) -> TurboTrainer:
    """Return the trainer of a prepared run."""
    trainer = RunTrainer(
        model=model,
        args=job.training,
        train_dataset=job.train_set,
        eval_dataset=job.eval_set,
        processing_class=job.tokenizer,
        data_collator=Collator(pad_token_id(job.tokenizer)),
        callbacks=list(callbacks),
        turbo_config=job.config,
        turbo_loaded=job.plugins,
        turbo_weights=job.weights,
    )
    trainer.turbo_facts = job.facts
    for theirs in (PrinterCallback, ProgressCallback):  # --disable_tqdm false would draw a second bar over the line
        trainer.remove_callback(theirs)
    return trainer


def _check_packing(job: Job, model: Any) -> None:
    """Refuse to pack rows for a model that lets them see each other, before anything is written."""
    if not job.data.packing or job.is_diffusion:  # whose mask tells documents apart, and is looked at by itself
        return
    bf16 = job.config.mixed_precision == "bf16"
    autocast = torch.autocast(job.runtime.device_type, dtype=torch.bfloat16, enabled=bf16 and not job.is_sharded)
    cache = set_cache(model, False)  # with one Transformers does not look for boundaries; training goes without, too
    with together("checking the model"), autocast:
        leak = packing_leak(model, vocabulary(job.model_config) or 16)
    set_cache(model, cache)
    if leak > (MOST_LEAK_BF16 if bf16 else MOST_LEAK):
        message = f"{type(model).__name__} lets packed rows see each other (logits move by {leak:.1%})"
        fail([Problem("--packing", "", message, "train it without packing, or with --attn_implementation sdpa")])


class _Begin(TrainerCallback):  # type: ignore[misc]
    """Makes room in the output folder once the optimizer, the schedule and the data loader could be made."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _clear_output(self.job)


def _clear_output(job: Job) -> None:
    """Remove an earlier run's checkpoints where that was asked for."""
    if job.training.should_save and job.data.overwrite_output_dir and job.resume is None:
        for folder in checkpoints(job.output_dir):
            remove(folder)


def _draw(job: Job, trainer: TurboTrainer) -> Path | None:
    """Draw the curve of what was trained, after an interrupt too."""
    if not job.training.should_save:
        return None
    name = Path(str(job.model_arguments.model_name_or_path)).name
    try:
        return write_curve(trainer.state.log_history, job.output_dir / CURVE_NAME, f"Training loss of {name}")
    except OSError as error:  # a picture is no reason to lose the run, nor its error
        log.warning_rank0("%s could not be written: %s", job.output_dir / CURVE_NAME, error.strerror)
        return None


def _save(job: Job, trainer: TurboTrainer) -> None:
    """Write the final model, its tokenizer and the record, each file whole."""
    staged = staging_folder(job.output_dir) / "final"
    try:
        trainer.save_model(str(staged), _internal_call=True)
    except BaseException:
        clear_staging(job.output_dir)
        raise
    if job.training.should_save:
        publish_files(staged, job.output_dir, replacing=WEIGHT_FILES)
        write_record(job.output_dir, job.config, trainer.turbo_run(), trainer.state.global_step)
    if job.training.push_to_hub:
        trainer.push_to_hub()


def _result(job: Job, trainer: TurboTrainer, seconds: float, curve: Path | None) -> TrainResult:
    points = loss_points(trainer.state.log_history)
    return TrainResult(
        output_dir=job.output_dir,
        log_history=trainer.state.log_history,
        final_loss=points[-1][1] if points else None,
        steps=trainer.state.global_step,
        seconds=seconds,
        config=job.config,
        model=trainer.turbo.release(trainer.model),
        tokenizer=job.tokenizer,
        curve=curve,
        trainer=trainer,
        peak_memory=job.runtime.peak_memory(),
        trained=not job.is_finished,
        resumed_at=0 if job.resume is None else saved_step(job.resume),
    )


def _announce(job: Job, say: Callable[..., None]) -> None:
    """Say what is about to happen, before the weights are read."""
    for line in base.settings_lines(job.config):
        say("%s", line)
    tally = job.tally
    say("data: %s rows, %s tokens, %s of them targets", f"{tally.rows:,}", f"{tally.tokens:,}", f"{tally.targets:,}")
    if job.data.packing and job.train_set is not None:
        say("packing: %s sequences of up to %d tokens", f"{len(job.train_set):,}", job.data.cutoff_len)
    if tally.cut:
        log.warning_rank0(
            "%d of %d rows are longer than cutoff_len %d and were cut", tally.cut, tally.rows, job.data.cutoff_len
        )
    if tally.without_target:
        log.warning_rank0("%d of %d rows hold no token to train on and were left out", tally.without_target, tally.rows)
    if job.train_set is not None and len(job.train_set) < job.plan.sequences:
        text = "the dataset holds %d sequences, fewer than the %d of one step: each epoch is one smaller step"
        log.warning_rank0(text, len(job.train_set), job.plan.sequences)
    say("device: %s", job.runtime.device_name())
    say("batch: %s, %d steps", job.plan, job.steps)
    checkpointing = "on" if job.config.activation_checkpointing.enabled else "off"
    say("precision: %s, activation checkpointing: %s", job.config.mixed_precision or "fp32", checkpointing)
    say("%s", base.describe_backend(job.config, job.plan.world_size))
    if job.is_finished:
        say(
            "%s is the end of this run: nothing is left to train (a longer one: raise the steps, as allowed)",
            job.resume,
        )
    elif job.resume is not None:
        say("resuming from %s", job.resume)


def _parameters(model: torch.nn.Module) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" + ("" if trainable == total else f", {trainable:,} of them trained")


def _summarise(result: TrainResult, say: Callable[..., None]) -> None:
    loss = "no loss was logged" if result.final_loss is None else f"final loss {result.final_loss:.4f}"
    if result.trained:
        memory = "" if result.peak_memory is None else f", peak memory {size(result.peak_memory)}"
        say("done: %s in %s, %s%s", _steps(result.resumed_at, result.steps), duration(result.seconds), loss, memory)
    else:
        say("done: nothing was left of %d steps, %s", result.steps, loss)
    say("model: %s", result.output_dir)
    if result.curve is not None:
        say("loss curve: %s", result.curve)
    say("its settings: torchturbo config show %s %s", KEYS["config_path"].cli, result.output_dir / CONFIG_NAME)


def _steps(before: int, steps: int) -> str:
    """Return which steps were taken: a resumed run has taken the last ones only."""
    if not before:
        return f"{steps} steps"
    taken = f"step {steps}" if before + 1 == steps else f"steps {before + 1}-{steps}"
    return f"{taken} of {steps}"


def _nothing(*args: object) -> None:
    """Say nothing."""
