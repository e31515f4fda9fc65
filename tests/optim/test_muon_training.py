"""``optimizer.name: muon`` under Hugging Face's Trainer: what is made, what is refused, and the same weights on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launching import launch
from ranks import run_ranks
from torch import Tensor, nn
from transformers import TrainingArguments

from torchturbo.adapters.hf_optimizer import newton_schulz_dtype
from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.errors import ConfigError
from torchturbo.optim.muon import MuonAdamW
from torchturbo.runtime.cpu import CpuRuntime
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples


def rows(count: int = 8) -> Examples:
    ids = torch.randint(3, 320, (count, 10), generator=torch.Generator().manual_seed(1)).tolist()
    return Examples([{"input_ids": row, "labels": row} for row in ids])


def trainer(folder: Path, *words: str, model: Any = None, options: Any = None, **changes: Any) -> TurboTrainer:
    """Return a trainer that takes Muon in fp32 by default."""
    set_torchturbo_args(parse_torchturbo_args(["--tt_optimizer", "muon", *words])[0])
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **(settings | changes))
    model = tiny.model("qwen3_moe") if model is None else model
    return TurboTrainer(model=model, args=args, train_dataset=rows(), data_collator=Collator(0), **(options or {}))


def test_it_takes_trainers_rate_decay_and_betas(tmp_path: Path, logged: list[str]) -> None:
    """For both kinds; the schedule moves all groups; the log says what went where."""
    run = trainer(tmp_path, warmup_steps=1, per_device_train_batch_size=8)
    run.train()

    made = run.optimizer.optimizer
    assert isinstance(made, MuonAdamW)
    assert [(True, 0.1), (False, 0.1), (False, 0.0)] == [
        (group["use_muon"], group["weight_decay"]) for group in made.param_groups
    ]
    assert {(0.9, 0.95)} == {group["betas"] for group in made.param_groups}
    assert {1e-3} == {group["initial_lr"] for group in made.param_groups}
    assert 1 == len({group["lr"] for group in made.param_groups}) and made.param_groups[0]["lr"] < 1e-3
    (line,) = [line for line in logged if line.startswith("optimizer: Muon")]
    assert line == (
        "optimizer: Muon for 24,576 parameters in 32 matrices, 2 fused ones split; AdamW for 20,928 in 13 tensors; "
        "Newton-Schulz in float32"
    )
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_without_the_key_the_optimizer_is_trainers(tmp_path: Path) -> None:
    """Null beats a lower layer."""
    run = trainer(tmp_path, "--tt_optimizer", "null")

    assert type(run.create_optimizer()) is torch.optim.AdamW


def refused(folder: Path, **settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        trainer(folder, **settings)
    return [str(problem) for problem in caught.value.problems]


def test_another_optimizer_is_refused_with_both_places(tmp_path: Path) -> None:
    """In the arguments, or in the constructor; all at once."""
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    assert [
        "TrainingArguments.optim: optimizer.name: chooses an optimizer, and --tt_optimizer muon chooses another; "
        "leave one of them out",
        "Trainer(optimizers): optimizer.name: chooses an optimizer, and --tt_optimizer muon chooses another; "
        "leave one of them out",
    ] == refused(tmp_path, optim="sgd", options={"optimizers": (other, None)})
    (problem,) = refused(tmp_path, options={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})})
    assert problem.startswith("Trainer(optimizer_cls_and_kwargs): optimizer.name: ")


def test_nothing_for_muon_is_an_error(tmp_path: Path) -> None:
    """Rather than AdamW under another name."""
    model = tiny.model("llama")
    model.model.layers.requires_grad_(False)

    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, model=model).train()

    assert (
        "--tt_optimizer: optimizer.name: LlamaForCausalLM has no trained linear layer or experts in its layers, and "
        "Muon updates nothing else; remove it, or train those too"
    ) == str(caught.value)


class Device(CpuRuntime):
    """Some device."""

    def __init__(self, device_type: str, bf16: bool, emulated: bool) -> None:
        self.device_type, self._bf16, self._emulated = device_type, bf16, emulated

    def supports_bf16(self) -> bool:
        return self._bf16

    def emulates_bf16(self) -> bool:
        return self._emulated


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("bf16", Device("cuda", True, False), torch.bfloat16),
        ("bf16", Device("npu", True, False), torch.bfloat16),
        ("fp32", Device("cuda", True, False), torch.float32),
        ("bf16", Device("cuda", True, True), torch.float32),
        ("bf16", Device("cuda", False, False), torch.float32),
        ("bf16", Device("cpu", True, False), torch.float32),
    ],
)
def test_newton_schulz_is_in_bf16_where_that_is_fast_and_asked_for(
    precision: str, device: Device, expected: torch.dtype
) -> None:
    """A run in fp32 stays in fp32, and so does a CPU."""
    config = launch(["--tt_mixed_precision", precision]).config
    assert config is not None

    assert expected == newton_schulz_dtype(config, device)


LAYOUTS: dict[int, list[tuple[str, list[str]]]] = {
    2: [("qwen3", []), ("qwen3_moe", ["--tt_ep_size", "2"]), ("qwen3_moe", [])],
    4: [("qwen3_moe", ["--tt_ep_size", "2", "--tt_sp_size", "2"])],
}


def trained(rank: int, world_size: int, folder: Path, layouts: list[tuple[str, list[str]]]) -> list[dict[str, Tensor]]:
    """Train three steps on all rows of each batch, in each layout, and return the weights."""
    found = []
    for kind, words in layouts:
        model = tiny.model(kind)
        sp_size = 2 if "--tt_sp_size" in words else 1
        words = ["--tt_mixed_precision", "fp32", *words]
        run = trainer(folder, *words, model=model, per_device_train_batch_size=8 * sp_size // world_size)
        run.train()
        names = run.model.named_parameters()
        found.append(
            {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in names}
        )
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_three_steps_give_the_same_weights_on_any_mesh(world_size: int, tmp_path: Path) -> None:
    """Through the whole engine: shards, experts, sequences, clipping, schedule."""
    layouts = LAYOUTS[world_size]
    expected = trained(0, 1, tmp_path, [(kind, []) for kind, _ in layouts])

    for found in run_ranks(world_size, trained, world_size, tmp_path, layouts):
        for weights, wanted in zip(found, expected, strict=True):
            assert wanted.keys() == weights.keys()
            for name, tensor in wanted.items():
                assert float((weights[name] - tensor).norm() / tensor.norm()) < 1e-5, name


def resumed(rank: int, folder: Path) -> tuple[bool, list[str]]:
    """Return whether a run that goes on from its middle ends bit for bit as it did, and why AdamW can't go on with it."""

    def weights(run: TurboTrainer) -> list[Tensor]:
        return [parameter.full_tensor().clone() for parameter in run.model.parameters()]

    words = ["--tt_mixed_precision", "fp32", "--tt_ep_size", "2"]
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run = trainer(folder, *words, **settings)
    run.train()
    expected = weights(run)
    middle = str(folder / "checkpoint-2")
    run = trainer(folder, *words, **settings)
    run.train(resume_from_checkpoint=middle)
    equal = all(torch.equal(*pair) for pair in zip(weights(run), expected, strict=True))
    other = ["--tt_optimizer", "null", "--tt_resume_allow", "optimizer.name"]
    with pytest.raises(ConfigError) as caught:
        trainer(folder, *words, *other, **settings).train(resume_from_checkpoint=middle)
    return equal, [str(problem) for problem in caught.value.problems]


def test_a_run_goes_on_where_it_was_and_with_muon_alone(tmp_path: Path) -> None:
    """The momentum is in the checkpoint; there is no other state in it that AdamW could take."""
    for equal, problems in run_ranks(2, resumed, tmp_path):
        assert equal
        (problem,) = problems
        assert "optimizer.name: the checkpoint was made with muon, this run has null" in problem
        assert problem.endswith("use the old value")
