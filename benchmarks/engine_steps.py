"""The programs whose training steps are compared: TurboTrainer, Hugging Face's Trainer, and a loop written out by hand.

All train the same Llama-shaped model in fp32 on rows of one length, with activation checkpointing, AdamW, clipping and
a schedule. A step is two micro-batches a rank. On a CPU the model has 20 M parameters and a step 1,024 tokens, which
takes about a second and a half of CPU time on one rank and twice that on two: long beside a Trainer's bookkeeping of
some milliseconds, and short enough that a twentieth of it, the limit, would show a gather too many or another pass over
the gradients. On an accelerator both are larger, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from engine_pairs import Side, Turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.generated.keys import KEYS

MODEL = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip
ON_DEVICE = MODEL | {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TOKENS, TOKENS_ON_DEVICE, ACCUMULATION, LENGTH = 1024, 16384, 2, 256
RATE, MAX_NORM = 1e-4, 1.0

TRAINER, BARE = "Trainer", "fully_shard loop"
TURBO, TURBO_SHARDED = "TurboTrainer", "TurboTrainer, FSDP2"
SHARED, UNSHARED = "TurboTrainer, sp_size 2", "TurboTrainer, sp_size 1"


class Rows(Dataset[dict[str, Tensor]]):
    """Random rows of one length, every token but the first a target."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, MODEL["vocab_size"], (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = self.ids[at]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def rows_of(device: str, ranks: int, sp_size: int = 1) -> int:
    """Return the rows of a micro-batch: a step has as many tokens a rank on any layout of so many ranks."""
    return (TOKENS if device == "cpu" else TOKENS_ON_DEVICE) * sp_size // (ranks * ACCUMULATION * LENGTH)


def one_rank() -> tuple[Side, Side]:
    """Return TurboTrainer and Trainer in one process."""
    return Side(TURBO, train_with_turbo, 1, {"sp_size": 1}), Side(TRAINER, train_with_trainer, 1, {"sp_size": 1})


def two_ranks() -> tuple[Side, Side]:
    """Return TurboTrainer and the loop on two ranks."""
    return Side(TURBO_SHARDED, train_with_turbo, 2, {"sp_size": 1}), Side(BARE, train_by_hand, 2, {"sp_size": 1})


def sequences() -> tuple[Side, Side]:
    """Return sequence parallelism and none, on two ranks: micro-batches of twice the rows, shared by both."""
    return Side(SHARED, train_with_turbo, 2, {"sp_size": 2}), Side(UNSHARED, train_with_turbo, 2, {"sp_size": 1})


def make_model(device: str) -> nn.Module:
    """Return the model for a device, always the same; it is made on the CPU."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **(MODEL if device == "cpu" else ON_DEVICE))
    ).train()
    model.config.use_cache = False
    return model


def checkpoint(model: Any) -> None:
    """Turn activation checkpointing on as the engine does, by the method's newer name where there is one."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


class TakesTurns(TrainerCallback):
    """Makes a Trainer wait for its turn before each step: a step lasts from one end of a step to the next one."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.turns.end():
            self.turns.begin()


def arguments(turns: Turns, settings: dict[str, Any]) -> TrainingArguments:
    """Return the arguments of both Trainers."""
    made = TrainingArguments(
        settings["folder"],
        per_device_train_batch_size=rows_of(settings["device"], settings["ranks"], settings["sp_size"]),
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=turns.count,
        learning_rate=RATE,
        max_grad_norm=MAX_NORM,
        use_cpu=settings["device"] == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10,
    )
    made._n_gpu = min(made.n_gpu, 1)  # or Trainer wraps the model in DataParallel where it sees several devices
    return made


def rows_for(turns: Turns, settings: dict[str, Any]) -> Rows:
    """Return as many rows as the run takes, so that it is one epoch for every program."""
    ranks, sp_size = settings["ranks"], settings["sp_size"]
    return Rows(turns.count * ACCUMULATION * ranks // sp_size * rows_of(settings["device"], ranks, sp_size))


def train_with_trainer(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Train by Hugging Face's Trainer."""
    model = make_model(settings["device"])
    checkpoint(model)
    _train(Trainer, model, turns, settings)


def train_with_turbo(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Train by TurboTrainer, with activation checkpointing as by default and operators as they are."""
    words = {"ops.policy": "native", "parallel_plan.sp_size": settings["sp_size"]}
    set_torchturbo_args(parse_torchturbo_args([f"{KEYS[path].cli}={value}" for path, value in words.items()])[0])
    _train(TurboTrainer, make_model(settings["device"]), turns, settings)


def _train(kind: type[Trainer], model: nn.Module, turns: Turns, settings: dict[str, Any]) -> None:
    trainer = kind(
        model=model,
        args=arguments(turns, settings),
        train_dataset=rows_for(turns, settings),
        data_collator=default_data_collator,
        callbacks=[TakesTurns(turns)],
    )
    trainer.train()


def train_by_hand(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Train by a plain loop: each layer, the embeddings and the root are units, as in the engine's FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, ranks = settings["device"], settings["ranks"]
    model: Any = make_model(device).to(device)
    checkpoint(model)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, turns.count)
    data = rows_for(turns, settings)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank)
    batches: Iterator[dict[str, Tensor]] = iter(
        DataLoader(data, rows_of(device, ranks), sampler=sampler, collate_fn=default_data_collator)
    )

    def step() -> None:
        for _ in range(ACCUMULATION):
            batch = {name: value.to(device) for name, value in next(batches).items()}
            (model(**batch).loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    turns.repeat(step)
