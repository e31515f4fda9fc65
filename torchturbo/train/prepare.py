"""Everything about a run that is known before a weight is read: files, folders, rows, batch, resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import clashes, compile_clash, loss_clash, said_values, taken_over, term_clashes
from torchturbo.adapters.hf_optimizer import nothing_for_muon, optimizer_clashes, shard_clashes
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.damage import saved_step
from torchturbo.checkpoint.record import run_facts
from torchturbo.checkpoint.resume import (
    agreed_checkpoint,
    allowed_changes,
    format_problem,
    resume_flag,
    resume_problems,
)
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.config import EngineConfig
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.engine.steps import heads
from torchturbo.engine.steps.diffusion import BLOCK, attention_obstacle
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.logging import get_logger
from torchturbo.objectives.diffusion.models import (
    SHIFTED,
    is_diffusion_model,
    longer_than_samples,
    rounded_up,
    token_problems,
)
from torchturbo.parallel.agree import together
from torchturbo.parallel.batch import BatchPlan
from torchturbo.parallel.mesh import is_sharded
from torchturbo.plugins.contract import Plugin, Run
from torchturbo.plugins.load import load_plugins, plugin_facts
from torchturbo.runtime import Runtime, current_runtime
from torchturbo.train.arguments import (
    CURVE_POINTS,
    DataArguments,
    ModelArguments,
    make_training_arguments,
)
from torchturbo.train.batches import pack
from torchturbo.train.commandline import Command
from torchturbo.train.examples import Encoder, Example, Examples, Tally
from torchturbo.train.model import (
    empty_model,
    folder_problem,
    learned_positions,
    load_config,
    load_tokenizer,
    local_source,
    missing_folder,
)
from torchturbo.train.needs import attention_problem, optimizer_problem, report_problems, scheduler_problem
from torchturbo.train.paths import output_problems
from torchturbo.train.rows import Row, SourceFile, read_files

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
    weights: WeightSource | None = None
    is_diffusion: bool = False
    """Whether the model is a diffusion model, which is trained by block diffusion."""
    positions: int | None = None
    """Longest sequence that the model's table of positions has room for; None for computed positions."""

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
    def grain(self) -> int:
        """Return of how many tokens sequences are made: the block of a diffusion model, 1 for others."""
        return self.config.diffusion.bd_block_size if self.is_diffusion else 1

    def look_at(self, model: Any) -> None:
        """Note what a model on the meta device tells of its sequences; None could not be made there."""
        self.is_diffusion = is_diffusion_model(self.model_config if model is None else model)
        self.positions = None if model is None else learned_positions(model)

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 holds the model's parameters, which it then takes before they have values."""
        return is_sharded(self.config, self.plan.world_size)

    @property
    def output_dir(self) -> Path:
        """Return the folder the run writes to."""
        return Path(str(self.training.output_dir))


def prepare(command: Command) -> Job:
    """Check and read everything but the weights; every rank stops together, with all that is wrong at that point."""
    parsed, config = command.parsed, command.config
    base.apply_log_level(config)
    values = with_evaluation(parsed.training, parsed.data)
    runtime = current_runtime(use_cpu=bool(values.get("use_cpu")))
    try:
        training = make_training_arguments(values, accelerator=runtime.device_type != "cpu")
    except ConfigError as error:
        fail(error.problems)
    resume = _resumed(training)  # by itself: a rank that stops before it would leave the others in its collective
    with together("checking the run"):
        job, rows, eval_rows = _check(parsed.model, parsed.data, training, config, runtime, resume)
    base.report_accumulation(config, job.plan, command.accumulation, "--gradient_accumulation_steps")
    with together("reading the model's configuration"):
        job.model_config = load_config(job.model_arguments)
        job.tokenizer = load_tokenizer(job.model_arguments)
        _check_model(job)
        round_up(job)
    with together("reading the dataset"):
        encode(job, rows, eval_rows)
    if "logging_steps" not in parsed.training:
        job.training.logging_steps = max(1, job.steps // CURVE_POINTS)
    with together("comparing with the checkpoint"):
        compare(job)
    return job


def with_evaluation(training: dict[str, Any], data: DataArguments) -> dict[str, Any]:
    """Evaluate once an epoch where there is something to evaluate on and nobody said when."""
    return {"eval_strategy": "epoch", **training} if data.eval_dataset else training


def _resumed(training: TrainingArguments) -> Path | Problem | None:
    """Return the checkpoint to go on from, or what is wrong with it; None where none was asked for. A collective."""
    wanted = training.resume_from_checkpoint
    if wanted is None or wanted.lower() == "false":
        return None
    return agreed_checkpoint(wanted, Path(str(training.output_dir)), "--resume_from_checkpoint")


def _check(
    model: ModelArguments,
    data: DataArguments,
    training: TrainingArguments,
    config: EngineConfig,
    runtime: Runtime,
    found: Path | Problem | None,
) -> tuple[Job, list[Row], list[Row]]:
    problems = [problem for problem in [folder_problem(str(model.model_name_or_path))] if problem]
    if model.tokenizer_name is not None and (problem := missing_folder(model.tokenizer_name, "--tokenizer_name")):
        problems.append(problem)
    rows, files, bad = read_files(data.dataset, "--dataset")
    eval_rows, _, eval_bad = read_files(data.eval_dataset, "--eval_dataset")
    problems += bad + eval_bad
    output_dir = Path(str(training.output_dir))
    problems += [found] if isinstance(found, Problem) else []
    resume = None if isinstance(found, Problem) else found
    problems += output_problems(output_dir, data.overwrite_output_dir or found is not None)
    problems += argument_problems(model, data, training, config, runtime)
    plan = base.plan_batch(
        config, training.per_device_train_batch_size, training.gradient_accumulation_steps, training.world_size
    )
    problems += plan if isinstance(plan, list) else []
    for problem in (base.device_problem(training.device.type, runtime), base.launch_problem(training.world_size)):
        if problem is not None:
            problems.append(problem)
    plugins, wrong = load_plugins(config, TurboTrainer.turbo_framework)
    problems += wrong + term_clashes(config, plugins, training.label_smoothing_factor, typed=True)
    if problems or isinstance(plan, list):
        raise ConfigError(problems)
    job = Job(config, model, data, training, runtime, plan, files=files, resume=resume, plugins=plugins)
    return job, rows, eval_rows


def argument_problems(
    model: ModelArguments, data: DataArguments, training: TrainingArguments, config: EngineConfig, runtime: Runtime
) -> list[Problem]:
    """Return what is wrong with arguments by themselves, whatever the number of ranks and what the folders hold."""
    problems = clashes({"accelerator_config": training.accelerator_config}, typed=True)
    if training.eval_strategy != "no" and not data.eval_dataset:
        problems.append(Problem("--eval_strategy", "", "there is nothing to evaluate on", "give --eval_dataset"))
    for problem in (
        scheduler_problem(training),
        loss_clash(config, training.label_smoothing_factor, typed=True),
        compile_clash(config, training.torch_compile, typed=True),
        attention_problem(model.attn_implementation, runtime),
    ):
        if problem is not None:
            problems.append(problem)
    problems += optimizer_clashes(config, said_values(training), typed=True)
    problems += shard_clashes(said_values(training), is_sharded(config, training.world_size), typed=True)
    problems += report_problems(training)
    return problems


def _check_model(job: Job) -> None:
    """Ask every step of the engine whether it can work on this model, made on the meta device: no weight is read."""
    training = job.training
    run = Run(job.config, job.runtime, training.world_size, training.process_index, job.output_dir)
    context = Context(job.runtime, training.world_size, training.process_index, hooks=Hooks(run, job.plugins))
    context.weights = local_source(job.model_arguments, job.model_config) if job.config.mtp.enabled else None
    model = empty_model(job.model_arguments, job.model_config)
    job.look_at(model)
    problems = model_problems(model, training, Engine(job.config, context))
    if problems := problems + diffusion_problems(job):
        raise ConfigError(problems)


def check_heads(job: Job) -> None:
    """Hold the extra heads that are asked for against files of the Hub, which are here by now; no weight is read."""
    if not job.config.mtp.enabled:
        return
    context = Context(job.runtime, job.training.world_size, job.training.process_index, weights=job.weights)
    model = empty_model(job.model_arguments, job.model_config)
    if model is not None and (problems := heads.check(model, job.config, context)):
        raise ConfigError(problems)


def model_problems(model: Any, training: TrainingArguments, engine: Engine) -> list[Problem]:
    """Return what the engine's steps and the optimizer find wrong with a model on meta; None could not be made there."""
    problems = [] if model is None else engine.problems(model)
    if (problem := optimizer_problem(training, model)) is not None:
        problems.append(problem)
    if model is not None and (problem := nothing_for_muon(model, engine.config)) is not None:
        problems.append(problem)
    return problems


def diffusion_problems(job: Job) -> list[Problem]:
    """Return what of a diffusion model does not show on the meta device: its two tokens, and what was asked for."""
    if not job.is_diffusion:
        return []
    found = token_problems(job.model_config, job.tokenizer)
    problems = [Problem("--model_name_or_path", "", *one) for one in found]
    chosen = job.model_arguments.attn_implementation
    if chosen is not None and (obstacle := attention_obstacle(chosen)) is not None:
        problems.append(Problem("--attn_implementation", "", *obstacle))
    if job.training.label_smoothing_factor:
        problems.append(Problem("--label_smoothing_factor", "", SHIFTED, "set it to 0"))
    return problems


def round_up(job: Job) -> None:
    """Let the longest sequence of a diffusion model end with a block."""
    if not job.is_diffusion:
        return
    block, said = job.config.diffusion.bd_block_size, job.data.cutoff_len
    job.data.cutoff_len = rounded_up(said, block)
    if job.data.cutoff_len != said:
        text = "--cutoff_len %d is rounded up to %d: whole blocks of %d tokens (%s)"
        log.info_rank0(text, said, job.data.cutoff_len, block, BLOCK)
    if block > said:
        place = job.config.origin(BLOCK).place
        log.warning_rank0("%s", Problem(place, BLOCK, *longer_than_samples(block, said, "--cutoff_len")))


def encode(job: Job, rows: Sequence[Row], eval_rows: Sequence[Row]) -> None:
    """Read rows into tokens, and keep them as the sequences of the run; raises :class:`ConfigError` for bad ones."""
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
    problems += _position_problems(job, [*examples, *eval_examples])
    if problems:
        raise ConfigError(problems)
    if job.data.packing:
        length, grain = job.data.cutoff_len, job.grain
        examples, eval_examples = pack(examples, length, grain), pack(eval_examples, length, grain)
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


def _position_problems(job: Job, examples: Sequence[Example]) -> list[Problem]:
    longest = rounded_up(max((len(example["input_ids"]) for example in examples), default=0), job.grain)
    if job.positions is None or longest <= job.positions:
        return []
    message = f"a row of {longest} tokens is longer than the {job.positions} positions that the model has learned"
    return [Problem("--cutoff_len", "", message, f"use --cutoff_len {job.positions}")]


def vocabulary(model_config: Any) -> int | None:
    """Return the number of tokens a model has embeddings for, or None where its configuration does not say."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def compare(job: Job) -> None:
    """Hold a run against the checkpoint that it resumes from; raises :class:`ConfigError` where they do not belong together."""
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
    facts = run_facts(taken_over(job.training, job.plan.accumulation), job.plan, extra)
    problems, _ = resume_problems(job.resume, job.config, facts, resume_flag())
    if problem := format_problem(job.resume, job.is_sharded):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
