"""The pipeline as data: its order, and no dead keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from transformers import TrainingArguments

from torchturbo.adapters import base
from torchturbo.checkpoint.resume import allowed_changes
from torchturbo.engine.args import TorchTurboArgs, parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, build_from_args, merge_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.pipeline import LAUNCH, OBSERVERS, STEPS
from torchturbo.generated.keys import KEYS, SECTIONS
from torchturbo.runtime import current_runtime


class Recorder:
    """Stands for a configuration and notes the dotted path of every leaf that is read."""

    def __init__(self, target: Any, seen: set[str], prefix: str = "") -> None:
        self._target, self._seen, self._prefix = target, seen, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        path = f"{self._prefix}{name}"
        if name == "runtime":
            return Recorder(value, self._seen)
        if path in SECTIONS and path:
            return Recorder(value, self._seen, f"{path}.")
        if path in KEYS:
            self._seen.add(path)
        return value

    def get(self, path: str) -> Any:
        self._seen.add(path)
        return self._target.get(path)

    def resolved(self, path: str) -> Any:
        self._seen.add(path)
        return self._target.resolved(path)


def config(*words: str) -> EngineConfig:
    return build_from_args(parse_torchturbo_args(words)[0])


def test_the_order_is_the_design() -> None:
    """Losses come before checkpointing, formats before both, determinism before everything that computes."""
    order = ["determinism", "precision", "losses", "activation checkpointing"]
    assert [step.name for step in STEPS if step.name in order] == order


def test_the_table_imports_no_torch() -> None:
    """`config show` reads it at every launch."""
    code = "import sys, torchturbo.engine.pipeline; print('torch' in sys.modules or 'transformers' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path.cwd()).strip() == "False"


MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"is_diffusion_model": True, "mask_token_id": 1},
    "deepseek_v3": {"num_nextn_predict_layers": 1, "kv_lora_rank": 8, "q_lora_rank": None, "n_routed_experts": 4}
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "qwen3": {
        "dspark_config": {"block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": 319}
        | {
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    },
}
"""Models on which every step has something to do: for experts and blocks, for a depth, for a draft."""
MESH = ("--tt_sp_size", "2", "--tt_ep_size", "2", "--tt_prefetch_strategy", "expert_with_layer")
WORDS = {"qwen3_moe": MESH, "deepseek_v3": ("--tt_enable_mtp",), "qwen3": ("--tt_enable_mtp",)}


def read(rank: int) -> dict[str, set[str]]:
    """Run every step on models that give it something to do; return what each reads of the keys that it claims."""
    found: dict[str, set[str]] = {step.name: set() for step in STEPS}
    for kind, changes in MODELS.items():
        seen: set[str] = set()
        recorded: Any = Recorder(config(*WORDS[kind]), seen)
        model, context = tiny.model(kind, **changes), Context(world_size=2, rank=rank)
        Engine(recorded, context)
        for step in STEPS:
            seen.clear()
            step.load()(model, recorded, context)
            found[step.name] |= seen & set(step.keys)
    return found


def test_a_step_reads_every_key_it_claims() -> None:
    """No dead keys: a leaf that a step claims and does not read fails here."""
    assert run_ranks(2, read) == [{step.name: set(step.keys) for step in STEPS}] * 2


def test_the_launch_reads_every_key_it_claims(tmp_path: Path) -> None:
    """The same for what is consumed beside the model; the file's path is read from the arguments."""
    seen: set[str] = set()
    recorded: Any = Recorder(config("--tt_gbs", "2"), seen)
    training = TrainingArguments(str(tmp_path), use_cpu=True)
    calls = {
        "configuration": lambda function: function(Recorder(TorchTurboArgs(), seen)),
        "logging": lambda function: function(recorded),
        "batch": lambda function: function(recorded, 1, 1, 2),
        "backend": lambda function: function(recorded, 2),
        "cpu offload": lambda function: function(torch.optim.SGD([torch.zeros(1)]), recorded, current_runtime()),
        "optimizer": lambda function: function(tiny.model(), training, recorded, (), current_runtime()),
        "checkpoints": lambda function: function(recorded),
        "resume": lambda function: function(recorded),
        "plugins": lambda function: function(recorded, "hf_trainer"),
    }
    assert calls.keys() == {step.name for step in LAUNCH}
    for step in LAUNCH:
        seen.clear()
        calls[step.name](step.load())
        assert set(step.keys) <= seen, step.name


def test_every_key_is_claimed_once() -> None:
    """A key of the schema that nothing consumes would be accepted and ignored."""
    claims = [key for step in (*STEPS, *LAUNCH, *OBSERVERS) for key in step.keys]

    assert sorted(KEYS) == sorted(claims)


def test_all_refusals_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the configuration and those the adapter found itself, in one error."""
    from torchturbo.errors import ConfigError, Problem

    args = parse_torchturbo_args(["--tt_bd_mask_low", "0.9", "--tt_bd_mask_high", "0.1"])[0]

    with pytest.raises(ConfigError) as caught:
        base.checked_config(merge_args(args), [Problem("--fp16", "", "no")])

    assert {"", "diffusion.bd_mask_low"} <= {item.key for item in caught.value.problems}
    assert len(caught.value.problems) == capsys.readouterr().err.count("error:") == 2


def test_allowed_changes_are_the_users() -> None:
    """Repeated options add up."""
    flag = str(KEYS["resume_allow"].cli)

    assert {"gbs", "seed"} == set(allowed_changes(config(flag, "gbs", flag, "seed")))
