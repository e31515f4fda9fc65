"""The framework's side of the command line: model, data and TrainingArguments, with every problem found at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments

from torchturbo.adapters.hf_parser import ReportingParser, one_line, parse_all
from torchturbo.errors import ConfigError, Problem
from torchturbo.generated.keys import KEYS


@dataclass
class ModelArguments:
    """Which model is trained."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Model folder, or a name on the Hub."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer folder or name, where it is not the model's."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a model on the Hub."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model code that the model's own repository brings."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention implementation, such as sdpa, eager or flash_attention_2."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file that replaces the tokenizer's own chat template."}
    )


@dataclass
class DataArguments:
    """What the model is trained on."""

    dataset: list[str] = field(
        default_factory=list,
        metadata={"help": "Training files: .jsonl or .json rows (messages, instruction, prompt, text), or .txt."},
    )
    eval_dataset: list[str] = field(default_factory=list, metadata={"help": "Evaluation files of the same kinds."})
    cutoff_len: int = field(default=2048, metadata={"help": "Longest sequence in tokens; longer rows are cut."})
    packing: bool = field(
        default=False,
        metadata={"help": "Put several rows into one sequence of cutoff_len tokens; no row attends to another."},
    )
    train_on_prompt: bool = field(
        default=False, metadata={"help": "Compute the loss on the prompt too, not on the answers alone."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove the checkpoints of an earlier run in output_dir first."}
    )


class Parsed(NamedTuple):
    """The framework's side of the command line."""

    model: ModelArguments
    data: DataArguments
    training: dict[str, Any]
    """Values for TrainingArguments, as typed; the object itself is made once nothing is wrong (it opens the ranks)."""


OWN_DEFAULTS: dict[str, Any] = {
    "disable_tqdm": True,  # the command draws its own progress line
    "logging_nan_inf_filter": False,  # Transformers would show the loss of a diverged run as its last finite one, or 0
}
"""Defaults of this command that differ from TrainingArguments' own; what is typed wins."""
CURVE_POINTS = 100
"""Points of a loss curve where logging_steps is not typed: every hundredth of the run is logged, at most every step."""

REMEDIES: dict[str, str] = {
    "evaluation_strategy": "it is --eval_strategy now",
    "warmup_ratio": "use --warmup_steps with a number below 1: the share of all steps",
    "overwrite_output_dir": "use --overwrite_output_dir true",
    "torch_dtype": "remove it: trainable parameters are fp32; choose the number format with mixed_precision",
    "dataset_dir": "give each file's path to --dataset",
    "stage": "remove it: this command does supervised fine-tuning and training on text, by the kind of the rows",
    "finetuning_type": "remove it: all parameters are trained",
    "template": "remove it: the tokenizer's own chat template is used (--chat_template FILE replaces it)",
    "flash_attn": "use --attn_implementation",
    "val_size": "give a file to --eval_dataset",
}
"""What to do about options that people know from other versions and programs."""


USAGE = "torchturbo train --model_name_or_path MODEL --dataset FILE [FILE ...] --output_dir FOLDER [OPTION ...]"
DESCRIPTION = (
    "Fine-tune a causal language model. The first options below are the model's and the data's, then come Transformers'"
    " TrainingArguments, and TorchTurbo's own options at the end."
)


class FrameworkParser(ReportingParser):
    """Knows the options of the model, the data and TrainingArguments."""

    def __init__(self) -> None:
        kinds = (ModelArguments, DataArguments, TrainingArguments)
        super().__init__(kinds, prog="torchturbo train", usage=USAGE, description=DESCRIPTION)


REQUIRED = ("model_name_or_path", "dataset", "output_dir")
"""What a training run can't do without."""


def parse_framework(argv: list[str], *, required: Collection[str] = REQUIRED) -> tuple[Parsed, list[Problem]]:
    """Read the framework's arguments, as far as they can be read, and return what is wrong with the others."""
    parser = FrameworkParser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # only what is typed enters the namespace: said is said
    typed, rest, problems = parse_all(parser, argv)
    problems += _unknown(parser, rest)
    parts = [_fields(kind, typed) for kind in (ModelArguments, DataArguments, TrainingArguments)]
    model, data = ModelArguments(**parts[0]), DataArguments(**parts[1])
    training = OWN_DEFAULTS | parts[2]
    broken = {problem.place for problem in problems}
    for name, value in (
        ("model_name_or_path", model.model_name_or_path),
        ("dataset", data.dataset),
        ("output_dir", training.get("output_dir")),
    ):
        if name in required and not value and f"--{name}" not in broken:
            problems.append(Problem(f"--{name}", "", "required, but not given"))
    if data.cutoff_len < 2:
        problems.append(Problem("--cutoff_len", "", f"expected at least 2 tokens, got {data.cutoff_len}"))
    problems += _out_of_bounds(training)
    return Parsed(model, data, training), problems


BOUNDS: dict[str, tuple[float, float]] = {
    "per_device_train_batch_size": (1, math.inf),
    "per_device_eval_batch_size": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "num_train_epochs": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "label_smoothing_factor": (0, 1),
    "seed": (0, 2**32 - 1),
    "data_seed": (0, 2**32 - 1),
    "dataloader_num_workers": (0, math.inf),
}
"""Values that training arguments can have; Transformers itself finds out late, or never."""


def _out_of_bounds(training: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, (low, high) in BOUNDS.items():
        value = training.get(name)
        if isinstance(value, int | float) and not (low <= value <= high and math.isfinite(value)):
            expected = f"{low:g} to {high:.17g}" if math.isfinite(high) else f"a number of at least {low:g}"
            problems.append(Problem(f"--{name}", "", f"expected {expected}, got {value}"))
    return problems


def make_training_arguments(values: dict[str, Any], *, accelerator: bool) -> TrainingArguments:
    """Make TrainingArguments, which also joins the process group under torchrun.

    What it refuses becomes a :class:`ConfigError`, unprinted.
    """
    values = dict(values)
    if not torch.accelerator.is_available():
        # Asked for no device, Transformers starts a CPU rank as a single process, beside the others of its launch.
        values.setdefault("use_cpu", True)
    if not accelerator:
        values.setdefault("dataloader_pin_memory", False)  # pinning needs a device; torch warns without one
    try:
        return TrainingArguments(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError([Problem("", "", one_line(error))]) from error


def framework_help() -> str:
    """Return the help of every framework option."""
    parser = FrameworkParser()
    parser.set_defaults(**OWN_DEFAULTS, logging_steps=f"every {CURVE_POINTS}th of the run")
    return str(parser.format_help())


def _unknown(parser: FrameworkParser, rest: list[str]) -> list[Problem]:
    """Return a problem for each option nobody knows, and for each word no option takes."""
    known = [
        option
        for action in parser._actions
        for option in action.option_strings
        if "_" in option or "-" not in option[2:]
    ]
    problems, after_option = [], False
    for word in rest:
        if word.startswith("-") and word != "--":
            after_option = "=" not in word
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), known, n=2, cutoff=0.7)
            remedy = REMEDIES.get(name.lstrip("-"), "")
            if not remedy and near:
                remedy = f"did you mean {' or '.join(near)}?"
            problems.append(Problem(name, "", "unknown argument", remedy))
        elif after_option:  # the unknown option's value
            after_option = False
        elif word != "--":
            remedy = ""
            if word.endswith((".yaml", ".yml", ".json")):
                remedy = f"a TorchTurbo configuration is given with {KEYS['config_path'].cli}, rows with --dataset"
            problems.append(Problem(word, "", "unexpected argument", remedy))
    return problems


def _fields(kind: type, typed: dict[str, Any]) -> dict[str, Any]:
    return {part.name: typed[part.name] for part in dataclasses.fields(kind) if part.name in typed}
