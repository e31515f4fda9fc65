"""One run of LLaMA-Factory with the engine underneath, from its command line to the end of its ``run_exp``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import clashes
from torchturbo.adapters.llama_factory.command import Command
from torchturbo.adapters.llama_factory.known import problems_with
from torchturbo.adapters.llama_factory.mapping import (
    diffusion_problems,
    frozen_parts,
    in_whole_blocks,
    placed,
    round_up_cutoff,
)
from torchturbo.adapters.llama_factory.package import TRAINERS, Package, import_package
from torchturbo.adapters.llama_factory.refusals import outside_losses, term_clashes
from torchturbo.adapters.llama_factory.trainer import FRAMEWORK, Launch, engine_trainer, quantised
from torchturbo.checkpoint.files import put_back
from torchturbo.checkpoint.resume import agreed_checkpoint, checkpoints
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.hooks import Hooks
from torchturbo.engine.steps.determinism import restored_determinism
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.generated.keys import KEYS
from torchturbo.objectives.diffusion.models import ATTRIBUTE, is_diffusion_model
from torchturbo.parallel.agree import from_first, together
from torchturbo.plugins.contract import Run
from torchturbo.plugins.load import load_plugins
from torchturbo.runtime import current_runtime

DATA_FACTS = (
    "dataset", "template", "cutoff_len", "train_on_prompt", "mask_history", "streaming", "buffer_size", "mix_strategy",
    "interleave_probs", "max_samples", "val_size", "packing", "neat_packing", "default_system", "enable_thinking",
)  # fmt: skip
METHOD_FACTS = ("stage", "finetuning_type", "disable_shuffling", "lora_rank", "lora_alpha", "lora_target")
"""LLaMA-Factory's arguments that decide what a step sees or what is trained: a resumed run has the same."""
ADAPTERS = ("lora", "oft")
"""Kinds of ``finetuning_type`` that train adapters."""
BEFORE_THE_MODEL = ("load_tokenizer", "get_template_and_fix_tokenizer", "get_dataset")
"""What a workflow calls before it loads the model, with what the user named."""
PACKING, KNAPSACK = "llamafactory.data.processor.supervised", "greedy_knapsack"
"""Where LLaMA-Factory chooses the samples of a packed row; a version without it packs by lengths that are not rounded."""
CPU_DEFAULTS = {"use_cpu": True, "dataloader_pin_memory": False}
"""What is added on a machine without an accelerator; what the user wrote wins."""


def run_command(command: Command, callbacks: Sequence[Any] = ()) -> None:
    """Run LLaMA-Factory's ``run_exp`` in this process, a rank of its launch, with the engine underneath."""
    config = command.config
    base.apply_log_level(config)
    plugins, problems = load_plugins(config, FRAMEWORK)
    problems += term_clashes(command.arguments.said, plugins)
    package = None
    try:
        package = import_package()
        problems += problems_with(command.arguments, package.arguments)
    except ConfigError as error:
        problems += error.problems
    if problems or package is None:
        fail(problems)
    _put_back(command)
    launch = Launch(config, command.arguments.said, plugins)
    with restored_determinism(), engine_underneath(package, launch):
        package.tuner.run_exp(args=_for_framework(command), callbacks=list(callbacks))
    launch.hooks.raise_end_errors()


def _put_back(command: Command) -> None:
    """Put a checkpoint back that a killed run had moved away, before any rank looks for the newest one."""
    output_dir = command.arguments.said.get("output_dir")
    if os.environ.get("RANK", "0") == "0" and output_dir is not None and isinstance(output_dir.value, str):
        put_back(Path(output_dir.value))


def _for_framework(command: Command) -> Any:
    """Return LLaMA-Factory's arguments with what this machine makes of the ones that nobody wrote."""
    if torch.accelerator.is_available():
        return command.arguments.for_framework
    # Asked for no device, newer versions of Transformers start a CPU rank as a single process beside the others.
    added = {name: on for name, on in CPU_DEFAULTS.items() if name not in command.arguments.said}
    given = command.arguments.for_framework
    if isinstance(given, dict):
        return added | given
    return [*given, *(word for name, on in added.items() for word in (f"--{name}", str(on)))]


@contextmanager
def engine_underneath(package: Package, launch: Launch) -> Iterator[None]:
    """Put the engine under LLaMA-Factory's trainers, and take it out again.

    Its workflows look their trainer class and their model loader up in their own modules; so does its tuner with
    the reading of arguments.
    """
    with ExitStack() as stack:
        tuner = package.tuner
        stack.enter_context(replaced(tuner, "get_train_args", _reader(tuner.get_train_args, launch)))
        for stage, (_, name) in TRAINERS.items():
            workflow = package.workflows[stage]
            stack.enter_context(replaced(workflow, name, engine_trainer(getattr(workflow, name), launch)))
            stack.enter_context(replaced(workflow, "load_model", _loader(workflow.load_model, launch)))
            for step in BEFORE_THE_MODEL:
                if callable(function := getattr(workflow, step, None)):
                    stack.enter_context(replaced(workflow, step, told(function)))
        packing: Any = sys.modules.get(PACKING)
        choose: Any = getattr(packing, KNAPSACK, None)
        if choose is not None:
            stack.enter_context(replaced(packing, KNAPSACK, in_whole_blocks(choose, lambda: launch.grain)))
        yield


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Hold another value under a module's name for the length of a block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of LLaMA-Factory's whose refusals are problems, as bad input of any other place is."""

    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, AssertionError, ImportError, OSError) as error:
            causes = [str(one) for one in (error, error.__cause__) if one is not None]
            fail([Problem("LLaMA-Factory", "", " ".join(" ".join(causes).split()) or type(error).__name__)])

    return telling


# ---- LLaMA-Factory's arguments, once it has read them ----


def _reader(read: Callable[..., Any], launch: Launch) -> Callable[..., Any]:
    def get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = told(read)(*args, **kwargs)
        take_over(parsed, launch)
        return parsed

    return get_train_args


def take_over(parsed: Sequence[Any], launch: Launch) -> None:
    """Leave what the engine does to the engine in LLaMA-Factory's arguments, and check what is known by now."""
    model, data, training, finetuning, _ = parsed
    config = launch.config
    model.disable_gradient_checkpointing = True  # the engine's step decides: one owner
    model.compute_dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    training.bf16 = config.mixed_precision == "bf16"
    parts = frozen_parts(config)
    for name, frozen in parts.items():
        setattr(finetuning, name, frozen)
    if is_diffusion_model(_known_model(model)):
        launch.grain = config.diffusion.bd_block_size
        round_up_cutoff(data, config, launch.said)
        data.turbo_grain = launch.grain  # of the arguments that a cache of packed rows is found by
    launch.facts |= {name: getattr(data, name, None) for name in DATA_FACTS}
    launch.facts |= {name: getattr(finetuning, name, None) for name in METHOD_FACTS}
    newest = _newest_whole(training, launch)  # by itself: a rank that stops before it would leave the others there
    with together("checking the run"):
        _check(training, launch, newest)


def _check(training: Any, launch: Launch, newest: Problem | None) -> None:
    config = launch.config
    runtime = current_runtime(use_cpu=training.use_cpu)
    plan = base.plan_batch(
        config, training.per_device_train_batch_size, training.gradient_accumulation_steps, training.world_size
    )
    groups = {"accelerator_config": getattr(training, "accelerator_config", None)}  # may have come from a file
    found: list[Any] = [
        *(clash._replace(place=placed(clash.place, launch.said)) for clash in clashes(groups, typed=True)),
        *(plan if isinstance(plan, list) else []), base.device_problem(training.device.type, runtime), base.launch_problem(training.world_size),
        newest,
    ]  # fmt: skip
    if problems := [problem for problem in found if isinstance(problem, Problem)]:
        raise ConfigError(problems)


def _newest_whole(training: Any, launch: Launch) -> Problem | None:
    """Resume from the newest whole checkpoint where LLaMA-Factory took the newest by itself. A collective.

    Each rank looked for it alone, some of them before the first one put back what a killed run had moved away.
    """
    if "resume_from_checkpoint" in launch.said or not training.do_train:
        return None
    output_dir = Path(training.output_dir)

    def look() -> tuple[str | None, bool]:
        return training.resume_from_checkpoint, bool(checkpoints(output_dir))

    chosen, is_ours = from_first("looking for the checkpoint", look)
    if chosen is not None and is_ours:
        found = agreed_checkpoint(True, output_dir, "output_dir")
        if isinstance(found, Problem):
            return found._replace(remedy="use another output_dir, or overwrite_output_dir: true")
        chosen = str(found)
    training.resume_from_checkpoint = chosen
    return None


# ---- the model, before its weights are read ----


def _loader(load: Callable[..., Any], launch: Launch) -> Callable[..., Any]:
    def load_model(
        tokenizer: Any, model_args: Any, finetuning_args: Any, is_trainable: bool = False, **rest: Any
    ) -> Any:
        if is_trainable:
            with together("checking the model"):
                _check_model(model_args, tokenizer, launch)
        return load(tokenizer, model_args, finetuning_args, is_trainable, **rest)

    return load_model


def _check_model(model_args: Any, tokenizer: Any, launch: Launch) -> None:
    """Ask every step of the engine whether it can work on the model, made on the meta device."""
    model = _empty_model(model_args)
    if model is None:
        return
    wrong = []
    if is_diffusion_model(model):
        wrong = diffusion_problems(model_args, model.config, tokenizer, launch.said, outside_losses(launch.said))
    if (problem := quantised(model)) is not None:
        wrong.append(problem)
    runtime, started = current_runtime(), dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if started else (1, 0)
    run = Run(launch.config, runtime, world_size, rank, Path(), FRAMEWORK)
    context = Context(runtime, world_size, rank, hooks=Hooks(run, launch.plugins))
    if launch.config.mtp.enabled and Path(model_args.model_name_or_path).is_dir():
        context.weights = WeightSource.find(model_args.model_name_or_path)
    wrong += _adapters(launch)
    if problems := Engine(launch.config, context).problems(model) + wrong:
        raise ConfigError(problems)


def _adapters(launch: Launch) -> list[Problem]:
    """Return a problem where LLaMA-Factory will put adapters into a model that is to get extra heads."""
    if not launch.config.mtp.enabled or launch.facts.get("finetuning_type") not in ADAPTERS:
        return []
    said = launch.said.get("finetuning_type")
    message = f"{launch.facts['finetuning_type']} saves adapters without the model, and the extra heads would be lost"
    remedy = f"use finetuning_type full or freeze, or set {KEYS['mtp.enabled'].cli} to false"
    return [Problem("finetuning_type" if said is None else said.place, "", message, remedy)]


def _model_config(model_args: Any) -> Any:
    """Return the model's configuration; None where it can't be read, as LLaMA-Factory will tell."""
    from transformers import AutoConfig

    options = {"trust_remote_code": model_args.trust_remote_code}
    hub = {"revision": model_args.model_revision, "cache_dir": model_args.cache_dir, "token": model_args.hf_hub_token}
    try:
        return AutoConfig.from_pretrained(model_args.model_name_or_path, **options, **hub)
    except Exception:  # the Hub's, and those of the checks that each configuration has of its own
        return None


def _known_model(model_args: Any) -> Any:
    """Return the model's configuration; where it leaves open what the class may say, the model on the meta device."""
    config = _model_config(model_args)
    if isinstance(getattr(config, ATTRIBUTE, None), bool) or is_diffusion_model(config):
        return config
    model = _empty_model(model_args)
    return config if model is None else model


def _empty_model(model_args: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    options = {"trust_remote_code": model_args.trust_remote_code}
    config = _model_config(model_args)
    try:
        pictures = type(config) in AutoModelForImageTextToText._model_mapping
        kind = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
        with torch.device("meta"):
            return kind.from_config(config, **options)
    except Exception:  # whatever a model needs to be made; reading its weights tells what is wrong with it
        return None
