"""LLaDA2-MoE's configuration, and what the engine knows of the family: registration, freezing, flops."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import llada2_tiny as llada2
from torchturbo.engine.parts import partition, parts_of
from torchturbo.errors import ConfigError
from torchturbo.models import register
from torchturbo.models.llada2.configuration import LLaDA2MoeConfig
from torchturbo.observe.matmuls import count
from torchturbo.parallel.sequence_check import obstacles
from torchturbo.train.arguments import ModelArguments
from torchturbo.train.model import load_config


def meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("facts", "billions"), [(llada2.MINI, 16.3), (llada2.FLASH, 102.9)], ids=["mini", "flash"])
def test_published_configurations_are_read_and_written(facts: dict[str, Any], billions: float, tmp_path: Path) -> None:
    """Key by key; only the format and the version of Transformers are told by newer names."""
    (tmp_path / "config.json").write_text(json.dumps(facts))
    config = AutoConfig.from_pretrained(tmp_path)
    config.auto_map = {kind: f"inclusionAI/LLaDA2.0--{name}" for kind, name in llada2.AUTO_MAP.items()}
    config.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    told = ("torch_dtype", "transformers_version", "auto_map")

    assert {key: value for key, value in facts.items() if key not in told} == {
        key: value for key, value in written.items() if key not in (*told, "dtype")
    }
    assert "bfloat16" == written["dtype"]
    assert {"rope_type": "default", "rope_theta": 600000, "partial_rotary_factor": 0.5} == config.rope_parameters
    assert billions == round(meta(config).num_parameters() / 1e9, 1)


def test_the_defaults_are_the_mini_models() -> None:
    assert (
        LLaDA2MoeConfig().to_dict().items()
        >= {
            key: value
            for key, value in llada2.MINI.items()
            if key not in ("architectures", "auto_map", "torch_dtype", "transformers_version")
        }.items()
    )


def test_scaled_rotation_is_read_and_written_beside_its_base() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = LLaDA2MoeConfig(rope_theta=10000, rope_scaling=scaling)
    written = config.to_dict()
    again = LLaDA2MoeConfig(**{key: value for key, value in written.items() if key != "model_type"})

    assert (10000, 0.5, scaling) == tuple(
        written[key] for key in ("rope_theta", "partial_rotary_factor", "rope_scaling")
    )
    assert "rope_parameters" not in written
    assert config.rope_parameters == again.rope_parameters


def test_everything_that_the_model_does_not_compute_is_named() -> None:
    wrong = {"norm_head": True, "score_function": "softmax", "router_dtype": "bf16", "rotary_dim": 32, "n_group": 7}
    with pytest.raises(Exception) as caught:
        LLaDA2MoeConfig(**wrong)
    told = str(caught.value)

    assert "norm_head is True, expected False" in told
    assert "score_function is 'softmax', expected 'sigmoid'" in told
    assert "router_dtype is 'bf16', expected 'fp32'" in told
    assert "rotary_dim is 32, expected head_dim 128 x partial_rotary_factor 0.5 = 64" in told
    assert "num_experts is 256, expected at least 2 for each of 7 groups" in told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"topk_group": 9}, "topk_group is 9, expected 1 to n_group, 8"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33, expected 1 to 32"),
        ({"num_key_value_heads": 3}, "16 heads are no multiple of 3"),
    ],
)
def test_routing_and_heads_must_come_out_even(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told):
        LLaDA2MoeConfig(**wrong)


@pytest.mark.parametrize("trusted", [None, True])
def test_the_merged_layout_of_its_trainer_is_refused_by_name(trusted: bool | None, tmp_path: Path) -> None:
    """Its own code would ask for another trainer's package; what to do about it is said."""
    merged = llada2.MINI | {"model_type": "llada2_moe_veomni"}
    (tmp_path / "config.json").write_text(json.dumps(merged))
    with pytest.raises(ConfigError) as caught:
        load_config(ModelArguments(model_name_or_path=str(tmp_path), trust_remote_code=bool(trusted)))
    told = str(caught.value.problems[0])

    assert "llada2_moe_veomni is dFactory's merged layout" in told
    assert "moe_convertor.py --mode split, and set model_type to llada2_moe" in told


def test_registering_again_changes_nothing() -> None:
    before = AutoConfig.for_model(llada2.KIND)
    register()

    assert type(before) is type(AutoConfig.for_model(llada2.KIND)) is LLaDA2MoeConfig


def test_a_command_line_is_parsed_without_the_family() -> None:
    """Neither parsing nor the package's name costs an import of torch or Transformers."""
    code = (
        "import sys, torchturbo.models, torchturbo.models.llada2; from torchturbo.engine.args import parse_torchturbo_args;"
        "parse_torchturbo_args(['--tt_sp_size', '2']);"
        "print(sorted({'torch', 'transformers', 'torchturbo.models.llada2.modeling'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]\n" == found.stdout


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", ["torchturbo.train.model", "torchturbo.adapters.hf_trainer"])
def test_training_knows_the_family(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory's adapter imports the second one before a model is asked for."""
    told: list[str] = []
    monkeypatch.setattr("torchturbo.models.register", lambda: told.append(module))
    runpy.run_module(module, run_name=module)  # once more, beside the one that is imported

    assert [module] == told


def test_all_of_it_is_language_model() -> None:
    """Freezing the language model freezes everything; there is nothing else."""
    model = llada2.model()
    parts = parts_of(model)
    assert parts is not None
    found = partition(model, parts)

    assert () == found.unplaced
    assert {name for name, _ in model.named_parameters()} == set(found.groups["language_model"])


def test_sequences_can_be_shared() -> None:
    assert [] == obstacles(llada2.model(), 2)


def test_its_flops_are_those_of_the_active_weights() -> None:
    """Three times forward: attention, dense MLP, router, 3 of 8 experts and the shared one, and the head."""
    model = llada2.model()
    config, flops = model.config, count(model)
    hidden, experts = config.hidden_size, 3 * config.hidden_size * config.moe_intermediate_size
    attention = hidden * 8 * (4 + 2 * 2) + 4 * 8 * hidden
    layers = 3 * attention + 3 * hidden * config.intermediate_size + 2 * (hidden * 8 + (3 + 1) * experts)
    weights, pairs = layers + hidden * config.vocab_size, 3 * 2 * 4 * 8

    assert not flops.left_out
    assert 2 * 3 * (weights * 10 + pairs * 50) == flops.model(10, 50)
