"""The part of a plan that needs the libraries of training: arguments, dataset, the model on the meta device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import term_clashes
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.resume import find_checkpoint
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.errors import ConfigError, Problem
from torchturbo.objectives.diffusion.models import rounded_up
from torchturbo.parallel.batch import BatchPlan
from torchturbo.parallel.mesh import is_sharded
from torchturbo.plan.layout import configuration, lay_out
from torchturbo.plan.model import examine_model
from torchturbo.plugins.contract import Run
from torchturbo.plugins.load import load_plugins
from torchturbo.runtime import current_runtime
from torchturbo.train.arguments import make_training_arguments
from torchturbo.train.commandline import TAKEN_OVER, read_everything
from torchturbo.train.model import (
    WEIGHTS,
    empty_model,
    folder_problem,
    is_streamed,
    load_config,
    load_tokenizer,
    local_source,
    mismatches,
    missing_folder,
    weight_source,
)
from torchturbo.train.paths import output_problems
from torchturbo.train.prepare import (
    Job,
    argument_problems,
    compare,
    diffusion_problems,
    encode,
    model_problems,
    round_up,
    with_evaluation,
)
from torchturbo.train.rows import Row, SourceFile, read_files

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from torchturbo.config.commandline import CommandLine
    from torchturbo.plan.report import Plan
    from torchturbo.train.arguments import ModelArguments, Parsed


def examine_training(line: CommandLine, plan: Plan) -> None:
    """Work out what a training command line would do on the ranks of a plan."""
    found = read_everything(line, complete=False)
    plan.errors += [problem for problem in found.problems if not _is_lack_of_weights(problem, found.parsed.model)]
    plan.names_model = bool(found.parsed.model.model_name_or_path)
    config = configuration(found.merged, plan)
    if config is None:
        return
    said = {name: value for name, value in found.said.items() if name not in TAKEN_OVER}
    parsed = found.parsed._replace(training=with_evaluation(said, found.parsed.data))
    runtime = current_runtime(use_cpu=bool(parsed.training.get("use_cpu")))
    try:
        training = make_training_arguments(parsed.training, accelerator=runtime.device_type != "cpu")
    except ConfigError as error:
        plan.errors += error.problems
        return
    plan.length = parsed.data.cutoff_len
    if plan.available is None and runtime.device_type != "cpu":
        plan.available = runtime.total_memory()
    lay_out(config, training.per_device_train_batch_size, training.gradient_accumulation_steps, plan)
    if plan.batch is not None:
        base.report_accumulation(
            config, plan.batch, found.said.get("gradient_accumulation_steps"), "--gradient_accumulation_steps"
        )
    plan.errors += argument_problems(parsed.model, parsed.data, training, config, runtime)
    plan.errors += _folder_problems(parsed, training)
    plugins, wrong = load_plugins(config, TurboTrainer.turbo_framework)
    plan.errors += wrong + term_clashes(config, plugins, training.label_smoothing_factor, typed=True)
    rows, files = _rows(parsed, plan)
    if parsed.model.model_name_or_path:
        job = Job(config, parsed.model, parsed.data, training, runtime, _batch(plan), files=files, plugins=plugins)
        _examine_model(job, rows, plan)


def _rows(parsed: Parsed, plan: Plan) -> tuple[list[list[Row]], list[SourceFile]]:
    """Read the rows of training and evaluation; what is wrong with their files needs neither a model nor a batch."""
    rows, files, bad = read_files(parsed.data.dataset, "--dataset")
    eval_rows, _, eval_bad = read_files(parsed.data.eval_dataset, "--eval_dataset")
    plan.errors += bad + eval_bad
    return ([] if bad or eval_bad else [rows, eval_rows]), files


def _batch(plan: Plan) -> BatchPlan:
    """Return the batch, or one micro-batch of one rank where the batch is wrong: rows can be checked with it, too."""
    return plan.batch or BatchPlan(1, 1, 1)


def _folder_problems(parsed: Parsed, training: TrainingArguments) -> list[Problem]:
    """Return what is wrong with the folders that were named, as they are now."""
    problems = []
    resume = _resume(training)
    if "output_dir" in parsed.training:
        folder = Path(str(training.output_dir)).expanduser()
        problems += output_problems(folder, parsed.data.overwrite_output_dir or resume is not None)
    problems += [resume] if isinstance(resume, Problem) else []
    name = parsed.model.tokenizer_name
    if name is not None and (problem := missing_folder(name, "--tokenizer_name")):
        problems.append(problem)
    return problems


def _resume(training: TrainingArguments) -> Path | Problem | None:
    """Return the checkpoint that a run would resume from, or why there is none; None where it is not asked to."""
    wanted = training.resume_from_checkpoint
    if wanted is None or wanted.lower() == "false":
        return None
    return find_checkpoint(wanted, Path(str(training.output_dir)).expanduser(), "--resume_from_checkpoint")


def _examine_model(job: Job, rows: list[list[Row]], plan: Plan) -> None:
    name = str(job.model_arguments.model_name_or_path)
    if problem := folder_problem(name):
        if not _is_lack_of_weights(problem, job.model_arguments):
            plan.errors.append(problem)
            return
        plan.warnings.append(problem._replace(message=f"{problem.message}: enough for a plan", remedy=""))
    try:
        job.model_config = load_config(job.model_arguments)
    except ConfigError as error:
        plan.errors += error.problems
        return
    run = Run(job.config, job.runtime, plan.world_size, 0, Path(str(job.training.output_dir)))
    engine = Engine(job.config, Context(job.runtime, plan.world_size, hooks=Hooks(run, job.plugins)))
    if problem is None and job.config.mtp.enabled:
        engine.context.weights = local_source(job.model_arguments, job.model_config)
    model = empty_model(job.model_arguments, job.model_config)
    job.look_at(model)
    round_up(job)
    plan.length = job.data.cutoff_len
    if problem is None or job.data.dataset:
        _examine_data(job, rows, plan)
    if problem is None and is_sharded(job.config, plan.world_size):
        plan.errors += _weight_problems(job)
    if plan.batch is not None and (job.train_set is not None or job.training.max_steps > 0):
        plan.steps = job.steps
    plan.warnings += _too_long(job)
    found = model_problems(model, job.training, engine) + _diffusion_problems(job)
    plan.errors += found
    if model is None:
        plan.warnings.append(Problem("--model_name_or_path", "", f"{name} can't be built without its weights"))
    elif not found and plan.axes is not None:
        if (chosen := job.model_arguments.attn_implementation) is not None:
            model.config._attn_implementation = chosen
        examine_model(model, name, engine, job.training, job.data, plan)


def _diffusion_problems(job: Job) -> list[Problem]:
    """Return what the launch would find of a diffusion model's tokens; a tokenizer that is not here may name both."""
    if job.tokenizer is not None:
        return diffusion_problems(job)
    return diffusion_problems(replace(job, tokenizer=SimpleNamespace(mask_token_id=0, pad_token_id=-1)))


def _too_long(job: Job) -> list[Problem]:
    """Warn of sequences that are longer than the model was made for; rows that were read say how long theirs are."""
    text = job.model_config.get_text_config()
    room = getattr(text, "max_position_embeddings", None)
    longest = job.data.cutoff_len
    if job.train_set is not None:
        sets = [rows for rows in (job.train_set, job.eval_set) if rows is not None]
        longest = max(len(rows[at]["input_ids"]) for rows in sets for at in range(len(rows)))
        longest = rounded_up(longest, job.grain)
    if not isinstance(room, int) or longest <= room:
        return []
    message = f"a sequence can have {longest:,} tokens, and the model was made for {room:,} positions"
    return [Problem("--cutoff_len", "", message, f"use --cutoff_len {room // job.grain * job.grain or job.grain}")]


def _is_lack_of_weights(problem: Problem, model: ModelArguments) -> bool:
    """Return whether a problem is that a model's folder holds its configuration alone, which is enough for a plan."""
    name = model.model_name_or_path
    if not name or not (Path(name).expanduser() / "config.json").is_file():
        return False
    has_weights = any(True for pattern in WEIGHTS for _ in Path(name).expanduser().glob(pattern))
    return not has_weights and problem == folder_problem(name)


def _weight_problems(job: Job) -> list[Problem]:
    """Return what the headers of the weight files show that does not fit the model; a sharded run reads slices of them."""
    try:
        source = weight_source(job.model_arguments, job.model_config)
    except ConfigError as error:
        return list(error.problems)
    if not is_streamed(job.model_arguments, job.model_config, source):
        return []
    return mismatches(job.model_arguments, job.model_config, source)


def _examine_data(job: Job, rows: list[list[Row]], plan: Plan) -> None:
    """Read tokenizer and rows as a run does, as far as they are named, and hold them against a checkpoint."""
    try:
        job.tokenizer = load_tokenizer(job.model_arguments)
        if not job.data.dataset or not rows:
            return
        encode(job, *rows)
        resume = _resume(job.training)
        job.resume = resume if isinstance(resume, Path) else None
        if plan.batch is not None:
            compare(job)
    except ConfigError as error:
        plan.errors += error.problems
