"""Everything about a run that is known before a weight is read: files, folders, rows, batch, resume."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import clashes, loss_clash, taken_over
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.damage import saved_step
from torchturbo.checkpoint.files import put_back
from torchturbo.checkpoint.record import run_facts
from torchturbo.checkpoint.resume import allowed_changes, checkpoints, find_checkpoint, resume_flag, resume_problems
from torchturbo.engine.config import EngineConfig
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.logging import get_logger
from torchturbo.parallel.agree import together
from torchturbo.parallel.batch import BatchPlan
from torchturbo.plugins.contract import Plugin, Run
from torchturbo.plugins.load import load_plugins, plugin_facts
from torchturbo.runtime import Runtime, current_runtime
from torchturbo.train.arguments import (
    CURVE_POINTS,
    DataArguments,
    ModelArguments,
    Parsed,
    make_training_arguments,
)
from torchturbo.train.batches import pack
from torchturbo.train.commandline import Command
from torchturbo.train.examples import Encoder, Example, Examples, Tally
from torchturbo.train.model import empty_model, folder_problem, load_config, load_tokenizer, missing_folder
from torchturbo.train.rows import Row, SourceFile, path_problem, read_files

log = get_logger(__name__)


@dataclass
class Job:
    """One run, ready for its model."""

    config: EngineConfig
    model_arguments: ModelArguments
    data: DataArguments
    training: TrainingArguments
    runtime: Runtime
    plan: BatchPlan
    tokenizer: Any = None
    model_config: Any = None
    train_set: Examples | None = None
    eval_set: Examples | None = None
    tally: Tally = field(default_factory=Tally)
    files: list[SourceFile] = field(default_factory=list)
    resume: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Return the optimizer steps of the run."""
        if self.training.max_steps > 0:
            return int(self.training.max_steps)
        rows = len(self.train_set) if self.train_set is not None else 0
        return self.plan.steps(rows, self.training.num_train_epochs, drop_last=self.training.dataloader_drop_last)

    @property
    def is_finished(self) -> bool:
        """Return whether the checkpoint that the run resumes from is its last one, so that nothing is left to train."""
        return self.resume is not None and saved_step(self.resume) >= self.steps

    @property
    def output_dir(self) -> Path:
        """Return the folder the run writes to."""
        return Path(str(self.training.output_dir))


def prepare(command: Command) -> Job:
    """Check and read everything but the weights; every rank stops together, with all that is wrong at that point."""
    parsed, config = command.parsed, command.config
    base.apply_log_level(config)
    values = _with_evaluation(parsed.training, parsed.data)
    runtime = current_runtime(use_cpu=bool(values.get("use_cpu")))
    try:
        training = make_training_arguments(values, accelerator=runtime.device_type != "cpu")
    except ConfigError as error:
        fail(error.problems)
    with together("checking the run"):
        job, rows, eval_rows = _check(parsed.model, parsed.data, training, config, runtime)
    base.report_accumulation(config, job.plan, command.accumulation, "--gradient_accumulation_steps")
    with together("reading the model's configuration"):
        job.model_config = load_config(job.model_arguments)
        job.tokenizer = load_tokenizer(job.model_arguments)
        _check_model(job)
    with together("reading the dataset"):
        _encode(job, rows, eval_rows)
    if "logging_steps" not in parsed.training:
        job.training.logging_steps = max(1, job.steps // CURVE_POINTS)
    with together("comparing with the checkpoint"):
        _compare(job)
    return job


def _with_evaluation(training: dict[str, Any], data: DataArguments) -> dict[str, Any]:
    """Evaluate once an epoch where there is something to evaluate on and nobody said when."""
    return {"eval_strategy": "epoch", **training} if data.eval_dataset else training


def _check(
    model: ModelArguments, data: DataArguments, training: TrainingArguments, config: EngineConfig, runtime: Runtime
) -> tuple[Job, list[Row], list[Row]]:
    problems = [problem for problem in [folder_problem(str(model.model_name_or_path))] if problem]
    if model.tokenizer_name is not None and (problem := missing_folder(model.tokenizer_name, "--tokenizer_name")):
        problems.append(problem)
    rows, files, bad = read_files(data.dataset, "--dataset")
    eval_rows, _, eval_bad = read_files(data.eval_dataset, "--eval_dataset")
    problems += bad + eval_bad
    output_dir = Path(str(training.output_dir))
    resume = None
    wanted = training.resume_from_checkpoint
    wanted = None if wanted is None or wanted.lower() == "false" else wanted
    if wanted is not None:
        if training.should_save:
            put_back(output_dir)
        found = find_checkpoint(wanted, output_dir, "--resume_from_checkpoint")
        problems += [found] if isinstance(found, Problem) else []
        resume = None if isinstance(found, Problem) else found
    problems += output_problems(output_dir, data.overwrite_output_dir or wanted is not None)
    problems += clashes({"accelerator_config": training.accelerator_config}, typed=True)
    if training.eval_strategy != "no" and not data.eval_dataset:
        problems.append(Problem("--eval_strategy", "", "there is nothing to evaluate on", "give --eval_dataset"))
    if config.mixed_precision == "bf16" and not runtime.supports_bf16():
        where = config.origin("mixed_precision").place
        problems.append(
            Problem(where, "mixed_precision", f"{runtime.device_name()} does not compute in bf16", "use fp32")
        )
    for problem in (scheduler_problem(training), loss_clash(config, training.label_smoothing_factor, typed=True)):
        if problem is not None:
            problems.append(problem)
    plan = base.plan_batch(
        config, training.per_device_train_batch_size, training.gradient_accumulation_steps, training.world_size
    )
    if isinstance(plan, Problem):
        problems.append(plan)
    for problem in (base.device_problem(training.device.type, runtime), base.launch_problem(training.world_size)):
        if problem is not None:
            problems.append(problem)
    plugins, wrong = load_plugins(config, TurboTrainer.turbo_framework)
    problems += wrong
    if problems or isinstance(plan, Problem):
        raise ConfigError(problems)
    job = Job(config, model, data, training, runtime, plan, files=files, resume=resume, plugins=plugins)
    return job, rows, eval_rows


def _check_model(job: Job) -> None:
    """Ask every step of the engine whether it can work on this model, made on the meta device: no weight is read."""
    training = job.training
    run = Run(job.config, job.runtime, training.world_size, training.process_index, job.output_dir)
    context = Context(job.runtime, training.world_size, training.process_index, hooks=Hooks(run, job.plugins))
    model = empty_model(job.model_arguments, job.model_config)
    if model is not None and (problems := Engine(job.config, context).problems(model)):
        raise ConfigError(problems)


def path_problems(parsed: Parsed) -> list[Problem]:
    """Return what is wrong with the paths of a command line, looking no deeper than that they are there."""
    problems: list[Problem | None] = []
    if parsed.model.model_name_or_path:
        problems.append(folder_problem(parsed.model.model_name_or_path))
    for option, paths in (("--dataset", parsed.data.dataset), ("--eval_dataset", parsed.data.eval_dataset)):
        problems += [path_problem(Path(path).expanduser(), option) for path in paths]
    if output_dir := parsed.training.get("output_dir"):
        problems += output_problems(Path(str(output_dir)), may_hold_checkpoints=True)
    return [problem for problem in problems if problem is not None]


def scheduler_problem(training: TrainingArguments) -> Problem | None:
    """Return what keeps a learning-rate schedule from being made, found by making one that nothing uses."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
    kwargs: Any = training.lr_scheduler_kwargs or {}  # a dictionary by now, whatever it was typed as
    try:
        get_scheduler(training.lr_scheduler_type, optimizer, 1, 100, kwargs)
    except (ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        return Problem("--lr_scheduler_type", "", message, "give --lr_scheduler_kwargs what it needs")
    return None


def output_problems(folder: Path, may_hold_checkpoints: bool) -> list[Problem]:
    """Return what keeps a run from writing to a folder."""
    place = "--output_dir"
    if folder.is_symlink() and not folder.exists():
        return [Problem(place, "", f"{folder} is a link that leads nowhere")]
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return [Problem(place, "", f"{nearest} is a file, expected a folder")]
    try:  # permissions say little of a file system that is full, read-only, or takes no files
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return [Problem(place, "", f"{nearest} can't be written to: {error.strerror or error}")]
    if not may_hold_checkpoints and (old := checkpoints(folder)):
        message = f"{folder} holds {old[-1].name} of an earlier run"
        return [
            Problem(
                place,
                "",
                message,
                "go on with --resume_from_checkpoint true, or use another folder, or --overwrite_output_dir true",
            )
        ]
    return []


def _encode(job: Job, rows: Sequence[Row], eval_rows: Sequence[Row]) -> None:
    _need_template(job.tokenizer, [*rows, *eval_rows])
    encoder = Encoder(job.tokenizer, cutoff_len=job.data.cutoff_len, train_on_prompt=job.data.train_on_prompt)
    examples, job.tally = encoder.encode_all(rows)
    eval_examples, eval_tally = encoder.encode_all(eval_rows)
    problems = [*job.tally.problems, *eval_tally.problems]
    for place, kept, read in (("--dataset", examples, rows), ("--eval_dataset", eval_examples, eval_rows)):
        if read and not kept and not problems:
            remedy = "raise --cutoff_len, or use --train_on_prompt true"
            problems.append(Problem(place, "", f"none of its {len(read)} rows holds a token to train on", remedy))
    problems += _vocabulary_problems(job, [*examples, *eval_examples])
    if problems:
        raise ConfigError(problems)
    if job.data.packing:
        examples, eval_examples = pack(examples, job.data.cutoff_len), pack(eval_examples, job.data.cutoff_len)
    job.train_set = Examples(examples)
    if (problem := _nothing_to_do(job)) is not None:
        raise ConfigError([problem])
    job.eval_set = Examples(eval_examples) if eval_examples else None


def _nothing_to_do(job: Job) -> Problem | None:
    """Return a problem where the run would take no step and pass its model off as trained."""
    rows, round_rows = len(job.train_set or []), job.plan.micro_batch * job.plan.dp_size
    if job.training.dataloader_drop_last and rows < round_rows:
        message = f"{rows} sequences do not fill one round of batches ({round_rows}), and the rest is dropped"
        return Problem("--dataloader_drop_last", "", message, "use smaller batches, or false")
    if job.steps < 1:
        place = "--max_steps" if job.training.max_steps > 0 else "--num_train_epochs"
        return Problem(place, "", f"the run would take {job.steps} steps", "raise it")
    return None


def _need_template(tokenizer: Any, rows: Sequence[Row]) -> None:
    chat = next((row for row in rows if row.kind == "chat"), None)
    if chat is not None and not tokenizer.chat_template:
        message = "is a conversation, but the model's tokenizer has no chat template"
        raise ConfigError(
            [Problem(chat.place, "", message, "give --chat_template FILE, or rows with prompt and completion")]
        )


def _vocabulary_problems(job: Job, examples: Sequence[Example]) -> list[Problem]:
    size = vocabulary(job.model_config)
    largest = max((max(example["input_ids"]) for example in examples), default=0)
    if size is None or largest < size:
        return []
    place = "--tokenizer_name" if job.model_arguments.tokenizer_name else "--model_name_or_path"
    return [
        Problem(
            place, "", f"the tokenizer makes token {largest}, the model has {size}", "they belong to different models"
        )
    ]


def vocabulary(model_config: Any) -> int | None:
    """Return the number of tokens a model has embeddings for, or None where its configuration does not say."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def _compare(job: Job) -> None:
    extra = {
        "dataset": [{"name": file.path.name, "sha256": file.sha256, "rows": file.rows} for file in job.files],
        "dataset_tokens": job.tally.tokens,
        "cutoff_len": job.data.cutoff_len,
        "packing": job.data.packing,
        "train_on_prompt": job.data.train_on_prompt,
    }
    job.facts = extra
    if job.resume is None:
        if allowed_changes(job.config):
            log.warning_rank0("%s says nothing to a run that resumes nothing", resume_flag())
        return
    extra = {**extra, **plugin_facts(job.plugins)}
    facts = run_facts(taken_over(job.training, job.plan.accumulation), job.plan.world_size, extra)
    problems, _ = resume_problems(job.resume, job.config, facts, resume_flag())
    if problems:
        raise ConfigError(problems)
