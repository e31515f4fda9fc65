"""Models and optimizers that can't be trained sharded: said at the start, and what can be is not refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acceptance
import parity
import peft
import pytest
import tiny
import torch
from ranks import run_ranks
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from torchturbo.adapters.hf_optimizer import SHARDED, shard_clashes
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.context import Context
from torchturbo.engine.shard_check import check, weightless
from torchturbo.engine.steps import shard as step
from torchturbo.errors import ConfigError

LORA = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ON = {"activation_checkpointing": {"enabled": True}}


def adapted(kind: str, settings: Any) -> Any:
    torch.manual_seed(4)
    return peft.get_peft_model(tiny.model(kind), settings)


def found(model: Any, settings: Any, ranks: int = 2) -> list[str]:
    """Return what the step says of a model on some ranks."""
    context = Context(world_size=ranks, sharded=ranks > 1)
    assert check(model, settings, context) == step.check(model, settings, context)
    return [str(problem) for problem in check(model, settings, context)]


PROMPTS = {
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "PREFIX_TUNING": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_can_not_be_sharded(kind: str) -> None:
    model = adapted("llama", PROMPTS[kind])

    assert [
        f"peft_type: {kind}: PEFT reads the weights of a prompt outside of the forward pass, where they are sharded; "
        "use LoRA of linear layers (target_modules), or one process"
    ] == found(model, parity.config())
    assert [] == found(model, parity.config(), ranks=1)


def test_prefixes_can_not_be_recomputed() -> None:
    """In one process either; other prompts are recomputed as the tokens are."""
    (problem,) = found(adapted("llama", PROMPTS["PREFIX_TUNING"]), parity.config(**ON), ranks=1)

    assert problem.endswith(
        "activation_checkpointing.enabled: prefix tuning hands its prefix on in the key-value cache, which recomputed "
        "layers fill twice; set it to false"
    )
    assert [] == found(adapted("llama", PROMPTS["PROMPT_TUNING"]), parity.config(**ON), ranks=1)


def test_adapters_of_fused_experts_can_not_be_sharded() -> None:
    model = adapted("qwen3_moe", peft.LoraConfig(**LORA, target_parameters=["mlp.experts.gate_up_proj"]))

    assert [
        "target_parameters: PEFT adds to gate_up_proj before the experts run forward, where it is sharded; "
        "use LoRA of linear layers (target_modules), or one process"
    ] == found(model, parity.config())
    assert [] == found(model, parity.config(), ranks=1)


@pytest.mark.parametrize("changes", [{}, {"target_parameters": ["v_proj.weight"]}, {"trainable_token_indices": [3]}])
def test_other_adapters_can_be(changes: dict[str, Any]) -> None:
    assert [] == found(adapted("llama", peft.LoraConfig(**LORA, **changes)), parity.config())


def test_skipped_layers_would_leave_the_others_waiting() -> None:
    """Wherever a model keeps the probability: in its configuration, or in a module that read it before."""
    small = {"word_embed_proj_dim": 32, "ffn_dim": 48}
    with torch.device("meta"):
        model = tiny.model("opt", layerdrop=0.25, **small)
        kept = tiny.model("opt", **small)
    kept.model.decoder.layerdrop = 0.1

    text = "each rank would skip layers of its own, and wait for the others in the rest; set layerdrop to 0"
    assert [f"layerdrop: 0.25: {text} in the model's configuration"] == found(model, parity.config())
    assert [f"layerdrop: 0.1: {text} in the model's configuration"] == found(kept, parity.config())
    assert [] == found(model, parity.config(), ranks=1)
    kept.model.decoder.layerdrop = 0.0
    assert [] == found(kept, parity.config())


def test_a_model_without_weights_says_so(tmp_path: Path) -> None:
    """Before torch does, in the middle of the first forward pass."""
    with torch.device("meta"):
        model = tiny.model()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")

    with pytest.raises(ConfigError) as caught:
        TurboTrainer(model=model, args=args, turbo_config=parity.config())
    assert (
        "Trainer(model): LlamaForCausalLM has no weights: model.embed_tokens.weight is on the meta device; give "
        "turbo_weights, where they are to be read from, or a model made by from_pretrained"
    ) == str(caught.value)
    with pytest.raises(ConfigError, match="is on the meta device"):
        TurboTrainer(model_init=lambda: model, args=args, turbo_config=parity.config())
    source: Any = object()
    assert [] == weightless(model, source) == weightless(tiny.model(), None)


def trained(rank: int, folder: str) -> Any:
    """Train single rows of the embeddings beside LoRA, and export them."""
    settings = peft.LoraConfig(**LORA, trainable_token_indices=list(range(3, 60)))
    made = acceptance.trainer(folder, ["--tt_gbs", "4"], model=adapted("llama", settings))
    made.train()
    made.save_model(f"{folder}/final")
    return acceptance.history(made)


def test_single_rows_of_the_embeddings_train_as_in_one_process(tmp_path: Path) -> None:
    (one,) = run_ranks(1, trained, str(tmp_path / "one"))
    two, _ = run_ranks(2, trained, str(tmp_path / "two"))

    for at, values in one.items():
        assert values == pytest.approx(two[at], rel=2e-5)


WORKS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Torch's own; the others of the list come with packages of their own."""
SCHEDULES = ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw", "grokadamw")
UNKNOWN = ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision")


def test_every_optimizer_of_transformers_is_decided() -> None:
    """Seen to work, refused by its reason, or one that needs a device or a package that there is not."""
    names = {name.value for name in OptimizerNames}
    refused = {name for name in names if shard_clashes({"optim": name}, sharded=True)}

    assert set(WORKS) | set(SCHEDULES) == SHARDED
    assert not refused & SHARDED
    assert set(UNKNOWN) == names - refused - SHARDED
    assert [] == shard_clashes({"optim": "adafactor"}, sharded=False) == shard_clashes({}, sharded=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adafactor", "keeps the means of whole rows and columns"),
        ("galore_adafactor_layerwise", "projects whole matrices"),
        ("galore_adamw_8bit", "projects whole matrices"),
        ("lomo", "updates a parameter in the backward pass"),
        ("adamw_torch_8bit", "keeps its state in tensors of torchao's"),
        ("adamw_8bit", "is of bitsandbytes"),
        ("rmsprop_bnb_32bit", "is of bitsandbytes"),
        ("paged_lion_32bit", "is of bitsandbytes"),
        ("ademamix", "is of bitsandbytes"),
    ],
)
def test_each_refusal_has_its_reason(name: str, reason: str) -> None:
    (problem,) = map(str, shard_clashes({"optim": name}, sharded=True, typed=True))

    assert problem.startswith(f"--optim: {name} {reason}")
    assert problem.endswith("; use adamw_torch, the key optimizer.name with muon, or one process")


def stepped(rank: int, folder: str, world: int) -> dict[str, Any]:
    """Train with each optimizer; with one that can't, return what is said at the start."""
    found: dict[str, Any] = {}
    for name in WORKS:
        made = acceptance.trainer(folder, ["--tt_gbs", "4"], kind="llama", optim=name, learning_rate=0.01)
        made.train()
        found[name] = acceptance.history(made)
    if world > 1:
        with pytest.raises(ConfigError) as caught:
            acceptance.trainer(folder, ["--tt_gbs", "4"], kind="llama", optim="adafactor")
        found["adafactor"] = str(caught.value)
    return found


def test_optimizers_of_torch_train_as_in_one_process(tmp_path: Path) -> None:
    (one,) = run_ranks(1, stepped, str(tmp_path / "one"), 1)
    two, _ = run_ranks(2, stepped, str(tmp_path / "two"), 2)

    assert two.pop("adafactor").startswith("TrainingArguments.optim: adafactor keeps the means")
    for name, history in one.items():
        for at, values in history.items():
            assert values == pytest.approx(two[name][at], rel=1e-4), (name, at)


def test_an_optimizer_that_was_never_tried_is_warned_of(tmp_path: Path, logged: list[str]) -> None:
    config = parity.config(backend_config={"cpu_offload": {"enabled": True, "mode": "all"}})
    for name in ("adamw_anyprecision", "sgd"):
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", optim=name)
        TurboTrainer(model=tiny.model(), args=args, turbo_config=config)

    assert ["TrainingArguments.optim: adamw_anyprecision was never tried on a sharded model"] == [
        line for line in logged if "never tried" in line
    ]
