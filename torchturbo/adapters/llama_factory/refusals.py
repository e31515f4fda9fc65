"""What of LLaMA-Factory does not run with the engine underneath: second owners, other stages, quantised training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchturbo.adapters import hf_arguments
from torchturbo.adapters.llama_factory.mapping import placed, switch
from torchturbo.adapters.llama_factory.said import is_ours
from torchturbo.engine.hooks import Hooks, name_of
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS

if TYPE_CHECKING:
    from torchturbo.adapters.llama_factory.said import Said
    from torchturbo.config.layers import Setting
    from torchturbo.plugins.contract import Plugin

STAGES = ("pt", "sft")
METHODS = ("full", "freeze", "lora")
WITHOUT = "run it with llamafactory-cli"
OPTIMIZER = "another owner of the optimizer, which works on whole gradients or inside backward"

SWITCHES: Mapping[str, tuple[str, str]] = {
    "pure_bf16": ("the engine keeps trainable parameters in fp32, in which small updates survive", "use bf16: true"),
    "fp8": ("the engine computes in bf16 or fp32", "use bf16: true"),
    "fp8_enable_fsdp_float8_all_gather": ("the engine computes in bf16 or fp32", "remove it"),
    "enable_liger_kernel": ("kernels have one owner, ops.policy, whose auto picks Liger's where they fit", "remove it"),
    "use_v1_kernels": ("kernels have one owner, ops.policy", "remove it"),
    "shift_attn": ("it replaces the attention that the engine works on", "remove it"),
    "use_unsloth": ("unsloth replaces the model that the engine works on", "remove it"),
    "use_unsloth_gc": ("activation checkpointing has one owner, the engine", "remove it"),
    "use_kt": ("KTransformers is another engine under the same loop", f"remove it, or {WITHOUT}"),
    "use_mca": ("Megatron is another engine under the same loop", f"remove it, or {WITHOUT}"),
    "use_hyper_parallel": ("HyperParallel is another engine under the same loop", f"remove it, or {WITHOUT}"),
    "use_muon": (OPTIMIZER, "remove it; see optimizer.name"),
    "use_galore": (OPTIMIZER, "remove it"),
    "use_apollo": (OPTIMIZER, "remove it"),
    "use_badam": (OPTIMIZER, "remove it"),
    "use_adam_mini": (OPTIMIZER, "remove it"),
}
"""Switches that are refused where they are on: (reason, remedy)."""

VALUES: Mapping[str, tuple[str, str]] = {
    "quantization_bit": ("quantised models are not trained here", f"remove it, or {WITHOUT}"),
    "quantization_device_map": ("quantised models are not trained here", "remove it"),
    "mixture_of_depths": ("it replaces the layers that the engine works on", "remove it"),
}
"""Arguments that are refused with any value: (reason, remedy)."""

ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "USE_MCA": SWITCHES["use_mca"],
    "USE_KT": SWITCHES["use_kt"],
    "USE_RAY": ("Ray starts the ranks in actors, which the engine does not reach", "unset it, and start torchrun"),
    "USE_V1": ("the engine runs under LLaMA-Factory's first trainer, not under v1", "unset it"),
    "ALLOW_EXTRA_ARGS": ("arguments that nobody knows would be ignored in silence", "unset it"),
}
"""Variables of LLaMA-Factory's that are refused where they are on: (reason, remedy)."""
ENABLED = ("true", "y", "1")
"""Words that LLaMA-Factory takes for on in a variable, in any case; all others are off."""


def refusals(said: Mapping[str, Said], environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return everything that can be refused by its name, before LLaMA-Factory is imported."""
    problems = [_stray(name, one.place) for name, one in said.items() if is_ours(name)]
    problems += _stage_and_method(said)
    for name, (reason, remedy) in SWITCHES.items():
        if switch(said, name):
            problems.append(Problem(said[name].place, "", reason, remedy))
    for name, (reason, remedy) in VALUES.items():
        if name in said and said[name].value:
            problems.append(Problem(said[name].place, "", reason, remedy))
    plain = {name: one.value for name, one in said.items()}
    for problem in hf_arguments.clashes(plain, typed=True):
        problems.append(problem._replace(place=placed(problem.place, said)))
    for name, (reason, remedy) in ENVIRONMENT.items():
        if environ.get(name, "").lower() in ENABLED:
            problems.append(Problem(name, "", reason, remedy))
    return problems


def _stray(name: str, place: str) -> Problem:
    flag = f"--{name}"
    path = next((path for path, key in KEYS.items() if key.cli == flag), "")
    where = f"use {flag} on the command line" + ("" if not path or KEYS[path].runtime else f", or {path} in its file")
    return Problem(place, "", "is TorchTurbo's, not LLaMA-Factory's", where if path else "remove it")


def _stage_and_method(said: Mapping[str, Said]) -> list[Problem]:
    problems = []
    for name, known, what in (("stage", STAGES, "stage"), ("finetuning_type", METHODS, "method")):
        value = said[name].value if name in said else known[-1]
        if value not in known:
            found = said[name].told(f"the {what} {{}}")
            message = f"the engine does not run {found}, it runs {', '.join(known)}"
            problems.append(Problem(said[name].place, "", message, WITHOUT))
    return problems


def nothing_to_do(said: Mapping[str, Said]) -> list[Problem]:
    """Return a problem where LLaMA-Factory would load the model and leave."""
    values = [said[name].value for name in ("do_train", "do_eval", "do_predict") if name in said]
    if any(values) or not said:
        return []
    return [Problem("", "do_train", "not given, so that nothing would run", "add do_train: true")]


OWN_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "label_smoothing_factor")
"""Arguments by which the loss is made outside the model, of its logits."""
AGAINST_KEYS: tuple[tuple[str, str, str], ...] = (
    *(
        (name, "loss_chunk.enabled", "it needs the logits, which a chunked loss never has as a whole")
        for name in OWN_LOSSES
    ),
    *((name, path, "its loss takes no further term") for name in OWN_LOSSES for path in hf_arguments.TERMS),
    ("torch_compile", "loss_chunk.enabled", "torch.compile can't follow the logits of a chunked loss"),
    ("enable_torch_profiler", "profiling", "two profilers can't record one step"),
    *((name, "optimizer.name", "it is for another optimizer") for name in ("optim", "optim_args", "loraplus_lr_ratio")),
)
"""Arguments that one of our keys can't be on beside: (name, key, reason)."""


def key_clashes(said: Mapping[str, Said], settings: Mapping[str, Setting]) -> list[Problem]:
    """Return a problem for each argument of LLaMA-Factory's that a key which is on has no place for."""
    return [
        Problem(said[name].place, "", f"{reason} ({path}: {settings[path].origin})", "turn one of them off")
        for name, path, reason in AGAINST_KEYS
        if _is_on(said, name) and settings[path].value
    ]


def term_clashes(said: Mapping[str, Said], plugins: Sequence[Plugin]) -> list[Problem]:
    """Return a problem for each plugin with a loss term where the loss is made outside the model, and takes none."""
    terms = Hooks(None, plugins).overriding("loss_term")
    return [
        Problem(said[name].place, f"plugin {name_of(plugin)}", "its loss takes no loss term", "leave one of them out")
        for name in OWN_LOSSES
        if _is_on(said, name)
        for plugin in terms
    ]


def outside_losses(said: Mapping[str, Said]) -> list[str]:
    """Return the arguments that are on by which the loss is made outside the model."""
    return [name for name in OWN_LOSSES if _is_on(said, name)]


TEXTS = ("optim", "optim_args")
"""Those of the arguments above that are text."""


def _is_on(said: Mapping[str, Said], name: str) -> bool:
    """Return whether a switch is on, or a number is not 0; text in the place of either is told elsewhere."""
    kinds = str if name in TEXTS else int | float
    return name in said and isinstance(said[name].value, kinds) and bool(said[name].value)
