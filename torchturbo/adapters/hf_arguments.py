"""TrainingArguments as a configuration layer: what the user said, what the engine takes over, what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchturbo.engine.hooks import Hooks, name_of
from torchturbo.errors import Problem

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig, FrameworkValue
    from torchturbo.plugins.contract import Plugin

PRECISION = "mixed_precision"
DETERMINISM = "use_deterministic_algorithms"
CHUNKED = "loss_chunk.enabled"
TERMS = ("mtp.enabled", "moe.aux_loss_coeff", "moe.z_loss_coeff")
"""Keys that add terms to the loss where they are on, or above 0."""
CHECKPOINTING = "activation_checkpointing"
CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""Transformers' newer and older name of the same switch; each has a twin that ends in ``_kwargs``."""

CLASHES: Mapping[str, tuple[str, str]] = {
    "fp16": ("loss scaling for fp16 has no place in the engine", "use bf16, or fp32"),
    "fp16_full_eval": ("the engine keeps one number format in training and evaluation", "remove it"),
    "bf16_full_eval": (
        "it would cast the fp32 parameters that training needs",
        "remove it: evaluation autocasts as training does",
    ),
    "deepspeed": ("DeepSpeed is another engine under the same loop", "remove it"),
    "fsdp": ("FSDP by accelerate is another engine under the same loop", "remove it"),
    "parallelism_config": ("accelerate's parallelism is another engine under the same loop", "remove it"),
    "use_liger_kernel": ("kernels have one owner, ops.policy, whose auto picks Liger's where they fit", "remove it"),
    "save_on_each_node": (
        "all ranks write one folder, which has to be on a disk that every node sees",
        "remove it, give an output_dir that the nodes share",
    ),
    "auto_find_batch_size": (
        "it would change the micro-batch behind the batch plan, in the middle of the run",
        "remove it, set per_device_train_batch_size",
    ),
}
"""Training arguments that would be a second owner of what the engine does: (reason, remedy)."""


FOR_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
"""Training arguments that only DistributedDataParallel reads, which several ranks do without."""


def idle_for_fsdp2(said: Mapping[str, Any]) -> list[str]:
    """Return the arguments that the user turned on and that a sharded model has no use for."""
    return [name for name in FOR_DDP if said.get(name)]


def said_values(args: Any) -> dict[str, Any]:
    """Return the values of a TrainingArguments that differ from its class's defaults: what the user said.

    A default that is given explicitly can't be told from one that is not; it has the same effect.
    """
    said = {}
    for field in dataclasses.fields(args):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name, default)
        # `None` switches are resolved to False when the arguments are made; that says nothing either.
        if value != default and not (default is None and value is False):
            said[field.name] = value
    return said


def place(name: str, typed: bool) -> str:
    """Return where a training argument was said: on the command line, or in the user's own code."""
    return f"--{name}" if typed else f"TrainingArguments.{name}"


def framework_values(said: Mapping[str, Any], *, typed: bool = False) -> list[FrameworkValue]:
    """Return the configuration keys that the user set through the framework."""
    from torchturbo.engine.config import FrameworkValue

    values = []
    if "bf16" in said:
        values.append(FrameworkValue(PRECISION, "bf16" if said["bf16"] else "fp32", place("bf16", typed)))
    if said.get("full_determinism"):
        values.append(FrameworkValue(DETERMINISM, True, place("full_determinism", typed)))
    for name in reversed(CHECKPOINTING_NAMES):
        if isinstance(said.get(name), bool):
            values.append(FrameworkValue(f"{CHECKPOINTING}.enabled", said[name], place(name, typed)))
        reentrant = options(said.get(f"{name}_kwargs")).get("use_reentrant")
        if isinstance(reentrant, bool):
            where = place(f"{name}_kwargs", typed)
            values.append(FrameworkValue(f"{CHECKPOINTING}.use_reentrant", reentrant, where))
    # Both names mirror each other in newer versions: the last of equal paths wins, once.
    return list({value.path: value for value in values}.values())


def loss_clash(config: EngineConfig, smoothing: float, own_loss: Any = None, *, typed: bool = False) -> Problem | None:
    """Return a problem where chunks are asked for and the loss is made outside the model, of logits in one piece."""
    outside = _loss_outside(smoothing, own_loss, typed)
    if not config.loss_chunk.enabled or outside is None:
        return None
    asked = config.origin(CHUNKED).place
    message = f"{outside[1]} needs the logits in one piece, and {asked or CHUNKED} asks for chunks"
    return Problem(outside[0], CHUNKED, message, "leave one of them out")


def compile_clash(config: EngineConfig, compiled: bool, *, typed: bool = False) -> Problem | None:
    """Return a problem where chunks are asked for and torch.compile, which can't follow logits that wait for a loss."""
    if not (config.loss_chunk.enabled and compiled):
        return None
    message = f"torch.compile can't follow the logits of a chunked loss, and {config.origin(CHUNKED).place or CHUNKED} asks for it"
    return Problem(place("torch_compile", typed), CHUNKED, message, "leave one of them out")


def term_clashes(
    config: EngineConfig, plugins: Sequence[Plugin], smoothing: float, own_loss: Any = None, *, typed: bool = False
) -> list[Problem]:
    """Return a problem for each loss term, a plugin's or an objective's, where the loss is made outside the model."""
    outside = _loss_outside(smoothing, own_loss, typed)
    if outside is None:
        return []
    where, what = outside
    asked = [(path, config.origin(path).place) for path in TERMS if config.get(path)]
    return [
        *(
            Problem(where, f"plugin {name_of(plugin)}", f"{what} takes no loss term", "leave one of them out")
            for plugin in Hooks(None, plugins).overriding("loss_term")
        ),
        *(
            Problem(
                where, path, f"{what} takes no loss term, and {place or path} asks for one", "leave one of them out"
            )
            for path, place in asked
        ),
    ]


def _loss_outside(smoothing: float, own_loss: Any, typed: bool) -> tuple[str, str] | None:
    """Return who computes the loss instead of the model: the place where that was asked for, and in words."""
    if smoothing:
        return place("label_smoothing_factor", typed), "label smoothing"
    return ("Trainer(compute_loss_func)", "a loss function of your own") if own_loss else None


def clashes(said: Mapping[str, Any], *, typed: bool = False) -> list[Problem]:
    """Return a problem for each said value that would be a second owner."""
    problems = [
        Problem(place(name, typed), "", reason, remedy) for name, (reason, remedy) in CLASHES.items() if said.get(name)
    ]
    for name in CHECKPOINTING_NAMES:
        if others := sorted(options(said.get(f"{name}_kwargs")).keys() - {"use_reentrant"}):
            where = place(f"{name}_kwargs", typed)
            problems.append(Problem(where, "", f"the engine has no {', '.join(others)}", "give use_reentrant alone"))
            break  # the older name mirrors the newer one
    if said.get("average_tokens_across_devices") is False:
        where = place("average_tokens_across_devices", typed)
        problems.append(Problem(where, "", "the engine always counts tokens over all ranks", "remove it"))
    accelerate = options(said.get("accelerator_config"))
    where = place("accelerator_config", typed)
    if accelerate.get("split_batches"):
        problems.append(Problem(where, "", "split_batches would divide each micro-batch over the ranks", "remove it"))
    if accelerate.get("even_batches") is False:
        message = "without even_batches ranks run out of batches one by one, and the others wait for them"
        problems.append(Problem(where, "", message, "remove it"))
    if "num_steps" in options(accelerate.get("gradient_accumulation_kwargs")):
        message = "gradient_accumulation_kwargs.num_steps is a second batch size"
        problems.append(Problem(where, "", message, "use gradient_accumulation_steps, or gbs"))
    return problems


def options(value: Any) -> Mapping[str, Any]:
    """Return a group of options by name, however it was given: as a mapping, its JSON text or an object.

    JSON text is read as TrainingArguments reads it: "true" and "false" in it are switches. What is no group is empty.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_hook=_with_switches)
        except (ValueError, RecursionError):  # a file's name, or told where the text is needed
            return {}
    if isinstance(value, Mapping):
        return value
    return vars(value) if hasattr(value, "__dict__") else {}


def _with_switches(group: dict[str, Any]) -> dict[str, Any]:
    words = {"true": True, "false": False}
    return {name: words.get(value.lower(), value) if isinstance(value, str) else value for name, value in group.items()}


class Unsaved(str):
    """A text that is everywhere itself but in a pickle, where it is empty: Trainer pickles all of its arguments."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, ()

    def __copy__(self) -> Unsaved:
        return self

    def __deepcopy__(self, memo: object) -> Unsaved:
        return self


def taken_over(args: Any, accumulation: int) -> Any:
    """Return a copy of the training arguments in which the engine is the one owner of what it does.

    A copy, because a second trainer made from the user's own object must find what the user said in it.
    """
    args = copy.copy(args)
    args.bf16 = False
    args.mixed_precision = "no"
    args.full_determinism = False
    if getattr(args, "hub_token", None):
        args.hub_token = Unsaved(args.hub_token)  # training_args.bin is written to each checkpoint, and uploaded
    for name in CHECKPOINTING_NAMES:
        if hasattr(args, name):
            setattr(args, name, False)
    args.gradient_accumulation_steps = accumulation
    if args.data_seed is None:
        # accelerate shuffles by the rank's torch seed where there is no data seed; a script that seeds each rank
        # differently would then show the ranks overlapping samples.
        args.data_seed = args.seed
    return args
