"""The part of a plan that needs the libraries of training: arguments, dataset, the model on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import term_clashes
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.checkpoint.resume import find_checkpoint
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.errors import ConfigError, Problem
from torchturbo.plan.layout import configuration, lay_out
from torchturbo.plan.model import examine_model
from torchturbo.plugins.contract import Run
from torchturbo.plugins.load import load_plugins
from torchturbo.runtime import Runtime, current_runtime
from torchturbo.train.arguments import make_training_arguments
from torchturbo.train.commandline import TAKEN_OVER, read_everything
from torchturbo.train.model import WEIGHTS, empty_model, folder_problem, load_config, load_tokenizer, missing_folder
from torchturbo.train.paths import output_problems
from torchturbo.train.prepare import Job, argument_problems, encode, model_problems, with_evaluation
from torchturbo.train.rows import read_files

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from torchturbo.config.commandline import CommandLine
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plan.report import Plan
    from torchturbo.plugins.contract import Plugin
    from torchturbo.train.arguments import Parsed


def examine_training(line: CommandLine, plan: Plan) -> None:
    """Work out what a training command line would do on the ranks of a plan."""
    found = read_everything(line, complete=False)
    plan.errors += [problem for problem in found.problems if not _is_lack_of_weights(problem, found.parsed)]
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
    plan.errors += wrong + term_clashes(plugins, training.label_smoothing_factor, typed=True)
    if parsed.model.model_name_or_path:
        _examine_model(parsed, training, config, runtime, plugins, plan)


def _folder_problems(parsed: Parsed, training: TrainingArguments) -> list[Problem]:
    """Return what is wrong with the folders that were named, as they are now."""
    problems = []
    wanted = training.resume_from_checkpoint
    resumes = wanted is not None and wanted.lower() != "false"
    if "output_dir" in parsed.training:
        folder = Path(str(training.output_dir)).expanduser()
        problems += output_problems(folder, parsed.data.overwrite_output_dir or resumes)
        if resumes:
            found = find_checkpoint(wanted, folder, "--resume_from_checkpoint")
            problems += [found] if isinstance(found, Problem) else []
    name = parsed.model.tokenizer_name
    if name is not None and (problem := missing_folder(name, "--tokenizer_name")):
        problems.append(problem)
    return problems


def _examine_model(
    parsed: Parsed,
    training: TrainingArguments,
    config: EngineConfig,
    runtime: Runtime,
    plugins: list[Plugin],
    plan: Plan,
) -> None:
    name = str(parsed.model.model_name_or_path)
    if problem := folder_problem(name):
        if not _is_lack_of_weights(problem, parsed):
            plan.errors.append(problem)
            return
        plan.warnings.append(problem._replace(message=f"{problem.message}: enough for a plan", remedy=""))
    try:
        model_config = load_config(parsed.model)
    except ConfigError as error:
        plan.errors += error.problems
        return
    folder = Path(str(training.output_dir))
    hooks = Hooks(Run(config, runtime, plan.world_size, 0, folder), plugins)
    engine = Engine(config, Context(runtime, plan.world_size, hooks=hooks))
    if plan.batch is not None:
        job = Job(config, parsed.model, parsed.data, training, runtime, plan.batch, model_config=model_config)
        _count_steps(job, plan)
    model = empty_model(parsed.model, model_config)
    found = model_problems(model, training, engine)
    plan.errors += found
    if model is None:
        plan.warnings.append(Problem("--model_name_or_path", "", f"{name} can't be built without its weights"))
    elif not found and plan.axes is not None:
        examine_model(model, name, engine, training, parsed.data, plan)


def _is_lack_of_weights(problem: Problem, parsed: Parsed) -> bool:
    """Return whether a problem is that a model's folder holds its configuration alone, which is enough for a plan."""
    name = parsed.model.model_name_or_path
    if not name or not (Path(name).expanduser() / "config.json").is_file():
        return False
    has_weights = any(True for pattern in WEIGHTS for _ in Path(name).expanduser().glob(pattern))
    return not has_weights and problem == folder_problem(name)


def _count_steps(job: Job, plan: Plan) -> None:
    """Read the dataset as a run does, where one is named, and count the optimizer steps."""
    if job.data.dataset:
        rows, _, bad = read_files(job.data.dataset, "--dataset")
        eval_rows, _, eval_bad = read_files(job.data.eval_dataset, "--eval_dataset")
        plan.errors += bad + eval_bad
        if bad or eval_bad:
            return
        try:
            job.tokenizer = load_tokenizer(job.model_arguments)
            encode(job, rows, eval_rows)
        except ConfigError as error:
            plan.errors += error.problems
            return
    if job.data.dataset or job.training.max_steps > 0:
        plan.steps = job.steps
