"""What training arguments need of packages and of the device, asked before anything is read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from torchturbo.config.names import did_you_mean
from torchturbo.errors import Problem, shorten
from torchturbo.runtime import Runtime


def scheduler_problem(training: TrainingArguments) -> Problem | None:
    """Return what keeps a learning-rate schedule from being made, found by making one that nothing uses."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
    kwargs: Any = training.lr_scheduler_kwargs or {}  # a dictionary by now, whatever it was typed as
    try:
        get_scheduler(training.lr_scheduler_type, optimizer, 1, 100, kwargs)
    except (ValueError, TypeError) as error:
        return Problem("--lr_scheduler_type", "", _line(error), "give --lr_scheduler_kwargs what it needs")
    return None


def optimizer_problem(training: TrainingArguments, model: Any) -> Problem | None:
    """Return what keeps an optimizer from being made: a package that is missing, arguments that do not fit.

    ``model`` may hold no weights; optimizers that pick layers by name look at it.
    """
    try:
        Trainer.get_optimizer_cls_and_kwargs(training, model)
    except (ImportError, ValueError, TypeError, RuntimeError) as error:
        if model is None and not isinstance(error, ImportError):
            return None  # it may be about the model that could not be made without its weights
        place = "--optim_args" if training.optim_args and "unpack" in str(error) else "--optim"
        remedy = "write name=value, and a comma between two" if place == "--optim_args" else "use another optimizer"
        return Problem(place, "", f"{OptimizerNames(training.optim).value}: {_line(error)}", remedy)
    return None


def report_problems(training: TrainingArguments) -> list[Problem]:
    """Return a problem for each logger that is unknown or whose package is missing."""
    problems = []
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in [training.report_to] if isinstance(training.report_to, str) else training.report_to or []:
        if name in ("none", "all"):
            continue
        if name not in known:
            problems.append(Problem("--report_to", "", f"unknown logger {shorten(name)!r}", did_you_mean(name, known)))
        elif not _is_there(name):
            problems.append(
                Problem("--report_to", "", f"the package of {name} is not installed", f"pip install {name}")
            )
    return problems


def attention_problem(implementation: str | None, runtime: Runtime) -> Problem | None:
    """Return what keeps an attention implementation from training on a kind of device."""
    if implementation == "flex_attention" and runtime.device_type == "cpu":
        return Problem("--attn_implementation", "", "flex_attention has no backward pass on a CPU", "use sdpa")
    return None


def _is_there(name: str) -> bool:
    """Ask Transformers whether a logger's package is installed; its functions are named by package or by logger."""
    stem = name.replace("_", "")
    for candidate in (name, stem, name.partition("_")[0], f"{name}kit"):
        if (available := getattr(integration_utils, f"is_{candidate}_available", None)) is not None:
            return bool(available())
    return True  # no way to ask


def _line(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 300)
